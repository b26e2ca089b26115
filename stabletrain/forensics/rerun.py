"""Runs a step again, unchanged or with one thing changed: what both kinds of subject share.

| variant | what is changed | what the result shows |
|---|---|---|
| same | nothing | not bitwise equal: a hardware fault, or a nondeterministic operation |
| fp32 | no autocast, no loss scale, no TF32, parameters in fp32 | finite: range or precision of a format is to blame |
| fresh_batch | another batch | finite: this batch is to blame |
| older_state | weights and buffers of an earlier step | finite: the updates since then are to blame |

A step of the trainer runs again on a copy of the model (`replay.py`). A step of a user's own loop runs again by calling
the user's closures on the live model (`guard/rerun.py`).
"""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stabletrain.errors import StabletrainError
from stabletrain.forensics.agreement import NotInvestigated
from stabletrain.forensics.facts import Outcome
from stabletrain.stability.precision.kernels import ieee_kernels

VARIANTS = ("same", "fp32", "fresh_batch", "older_state")
"""The variants, in the order in which they run until the deadline; but a compiled one runs last."""


Watch = Callable[[nn.Module], contextlib.AbstractContextManager]
"""Returns a context around forward and backward of a model, such as a trace."""


class NotPossible(StabletrainError):
    """Raised if something is missing that the variant needs."""


class RerunResult(NamedTuple):
    """The result of running a step again.

    Attributes:
        loss: mean over the step.
        grad_norm: of the unscaled gradients, before clipping; NaN if there was no backward pass.
        gradients: of the parameters, in order; None for those without.
    """

    loss: float
    grad_norm: float
    gradients: Sequence[Tensor | None]


def outcome_of(run: Callable[[], RerunResult], deadline: float) -> Outcome:
    """Runs a step again until it is too late to begin; never raises because of the model.

    Args:
        deadline: in `time.monotonic()` seconds.

    Raises:
        NotInvestigated: all ranks have agreed to stop.
    """
    began = time.monotonic()
    if began >= deadline:
        return Outcome(not_run="the time limit was reached")
    try:
        found = run()
        zeros = zero_share(found.gradients)
    except NotInvestigated:
        raise
    except NotPossible as error:
        return Outcome(not_run=str(error))
    except Exception as error:  # a user's model may raise anything, and an investigation must not end the run
        return Outcome(not_run=" ".join(f"{type(error).__name__}: {error}".split())[:200])
    finite = math.isfinite(found.loss) and math.isfinite(found.grad_norm)
    return Outcome(finite, found.loss, found.grad_norm, None, zeros, time.monotonic() - began)


def zero_share(gradients: Sequence[Tensor | None]) -> float:
    """Returns the share of gradient elements that are exactly 0, in [0, 1]."""
    found = [gradient for gradient in gradients if gradient is not None]
    found = [each.to_local() if hasattr(each, "to_local") else each for each in found]  # ty: ignore[not-callable]
    dense = [each.coalesce().values() if each.layout != torch.strided else each for each in found]
    zeros = sum(int((each == 0).sum()) for each in dense)
    return zeros / max(sum(each.numel() for each in dense), 1)


@contextlib.contextmanager
def in_true_fp32(model: nn.Module) -> Generator[None]:
    """A context without autocast and TF32, in which fp16 and bf16 parameters and buffers are fp32."""
    narrow = (torch.float16, torch.bfloat16)
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.dtype in narrow and not hasattr(t, "to_local")]
    own = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        with ieee_kernels(), without_autocast():
            yield
    finally:
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data


@contextlib.contextmanager
def without_autocast() -> Generator[None]:
    """A context in which every `torch.autocast`, also one that the user's code enters, does nothing."""
    enter = torch.autocast.__enter__

    def disabled(context: Any) -> Any:
        context._enabled, wanted = False, context._enabled
        try:
            return enter(context)
        finally:
            context._enabled = wanted

    torch.autocast.__enter__ = disabled  # ty: ignore[invalid-assignment]
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):  # one that is entered already
            yield
    finally:
        torch.autocast.__enter__ = enter
