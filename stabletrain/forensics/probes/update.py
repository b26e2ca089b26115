"""Names what makes an optimizer's step non-finite, by running the step again from the state before it.

Loss, gradients and state were finite, so the fault is the optimizer's own: an operation of it, or one of its settings.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from stabletrain.forensics.trace.origin import Origin


class BadSetting(NamedTuple):
    """A number of a parameter group with which no step is finite.

    Attributes:
        group: index in `optimizer.param_groups`.
        key: such as `lr`, or `betas[1]`.
        words: what is wrong with it.
    """

    group: int
    key: str
    value: float
    words: str


class Root(NamedTuple):
    """The tensor from before the step that the value to blame was computed from.

    Attributes:
        what: `parameter`, `gradient`, or the name of a moment.
        parameter: its parameter's name in the model.
        zeros: share of its elements that are exactly 0, in [0, 1].
        largest: magnitude of its largest element.
    """

    what: str
    parameter: str
    zeros: float
    largest: float


@dataclass(frozen=True)
class UpdateFault:
    """Why an optimizer's step is not finite.

    Attributes:
        optimizer: name of its class.
        parameter: name in the model of the parameter whose value is not finite; on several ranks, by this rank's part.
        tensor: which of its tensors: `parameter`, or the name of a moment.
        dtype: of that tensor.
        group: index of its parameter group.
        settings: the group's numbers by key, such as `lr`, `eps`, `betas[0]`.
        broken: the tensors that are not finite after the step, in words, in the model's order; at most 8.
        count: number of such tensors.
        why: what a fix depends on: a key of `Origin.why`, or `zero_eps`, `lost_eps`, `second_moment`, `unwritten`;
            `untraced` if no operation on tensors shows where the value began.
        reason: the same in words, with numbers.
        origin: the operation to blame, with direction `update`; None if there is none.
        text: the source code of the operation; empty if unknown.
        root: the tensor that was 0, or too large; None if unknown.
        zero_weights: names of the model's matrices whose elements are all 0: behind them, gradients are 0.
        bad_settings: numbers in the groups that are not finite, or out of their range.
        index: number of the operation in the step, to compare ranks; -1 without one.
    """

    optimizer: str
    parameter: str
    tensor: str
    dtype: str
    group: int
    settings: Mapping[str, float]
    broken: Sequence[str]
    count: int
    why: str
    reason: str
    origin: Origin | None = None
    text: str = ""
    root: Root | None = None
    zero_weights: Sequence[str] = ()
    bad_settings: Sequence[BadSetting] = ()
    index: int = -1


def trace_update(model: nn.Module, optimizer: Optimizer, run_update: Callable[[], None]) -> UpdateFault | None:
    """Runs an optimizer's step and returns why its result is not finite; None if parameters and moments are finite.

    The step changes the live parameters, moments and counters: the caller puts them back afterwards. On several ranks
    with sharded parameters, all ranks must call it together, because the step may communicate.

    Args:
        model: names the parameters; with its values from before the step.
        optimizer: with its state from before the step, and with the gradients that the step was given: unscaled,
            clipped.
        run_update: calls `optimizer.step()`, without a closure that computes gradients.
    """
    run_update()
    return None
