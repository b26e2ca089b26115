"""Averages the weights over time, in fp32 beside the live ones, which train as without it.

    a <- a + share (w - a)                 after each applied update that is due; n earlier weights are in `a`

| kind | share | so that |
|---|---|---|
| `EMA` | 1 - d, d = min(decay, (1 + n) / (warmup + n)) | the last 1 / (1 - decay) weights or so count |
| `Snapshots` | 1 / (n + 1) | `a` is the mean of the weights since the start |

The first weights enter with share 1, so `a` never holds what the model was initialised with. Both kinds keep one copy,
whatever they average over. A mean of the last k weights (LAWA) would need k copies; a mean of all since a share of the
run needs one.

Sources: EMA as PyTorch's `swa_utils` and timm's `ModelEmaV3` compute it (arXiv 2411.18704), with the warmup of
TensorFlow's `ExponentialMovingAverage`; SWA, arXiv 1803.05407; LAWA, arXiv 2306.03241; means over windows in fp32
instead of a cooldown, arXiv 2405.18392. BatchNorm's statistics are averaged too, as timm does. SWA computes them again
in a pass over training data, which every evaluation here would need.

A withheld step does not enter: the average is written by a kernel that knows the gate.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stabletrain.buffers import buffers_of
from stabletrain.errors import ConfigError
from stabletrain.records import TrainState
from stabletrain.stability.optimizers.gated import subtract_


class Live(NamedTuple):
    """The live tensors that are averaged.

    Attributes:
        weights: the parameters, by name.
        buffers: for each buffer, by name, the buffers of its module: a forward pass may put another tensor there.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Mapping[str, Any]]

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name."""
        found = {name: held[name.rpartition(".")[2]] for name, held in self.buffers.items()}
        return {**self.weights, **found}


@dataclass(frozen=True)
class Average:
    """The weights averaged over time, which belong to the state.

    Attributes:
        kind: what averages them; an average of another kind is not restored.
        tensors: the averages by name, fp32, sharded as the live ones.
        count: how many weights have entered, 0-d int64 on the device.
        start: number of steps before the first whose weights may enter.
        live: what is averaged.
    """

    kind: str
    tensors: dict[str, Tensor]
    count: Tensor
    start: int
    live: Live

    def captured(self) -> dict[str, Any]:
        """Returns what a checkpoint holds; its tensors are the live ones."""
        return {"kind": self.kind, "count": self.count, "tensors": dict(self.tensors)}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any] | None, like: Callable[[Tensor, Any], Tensor]) -> None:
        """Restores what was captured; empties the average if nothing was, or one of another kind or of other tensors.

        Args:
            saved: from a checkpoint.
            like: returns a saved tensor in the form of a live one, which may be sharded.
        """
        if saved is None or saved["kind"] != self.kind or shapes(saved["tensors"]) != shapes(self.tensors):
            for tensor in (*self.tensors.values(), self.count):
                tensor.zero_()
            return
        for name, tensor in self.tensors.items():
            tensor.copy_(like(tensor, saved["tensors"][name]))
        self.count.copy_(saved["count"])


def shapes(tensors: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Returns the shape of each tensor."""
    return {name: tensor.shape for name, tensor in tensors.items()}


@dataclass(frozen=True)
class NoAveraging:
    """No average. Base class of all kinds, and what each must offer."""

    def begin(self, model: nn.Module, steps: int) -> Average | None:
        """Returns an average that holds no weights yet; this one has none.

        Args:
            model: on its device, sharded already.
            steps: of the run.

        Raises:
            ConfigError: no weights would ever enter it.
        """
        return None

    def __call__(self, state: TrainState, gate: Bool[Tensor, ""]) -> None:
        """Lets the weights enter `state.average` if `gate` is open; must not synchronize with the host.

        Call it before the step is counted. Does nothing.
        """


@dataclass(frozen=True)
class Averaging(NoAveraging):
    """Averages the trained weights and the buffers that are saved with them, such as BatchNorm's statistics.

    Attributes:
        every: steps between two whose weights may enter.
    """

    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"averaging.every={self.every} is below 1; fix: averaging.every=1 or more")

    def share(self, entered: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Returns the share of the next weights, in (0, 1], after `entered` others."""
        raise NotImplementedError

    def first(self, steps: int) -> int:
        """Returns the number of steps before the first whose weights may enter."""
        return 0

    def begin(self, model: nn.Module, steps: int) -> Average:
        """Returns an average that holds no weights yet."""
        start = self.first(steps)
        if start // self.every * self.every + self.every > steps:
            raise ConfigError(
                f"averaging.every={self.every}: none of the steps {start + 1} to {steps} is a multiple of it, so no "
                "weights would be averaged; fix: lower averaging.every, or raise steps"
            )
        # Only what is trained, once each; sharded parameters are known by these objects alone, as to the optimizer.
        weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
        live = Live({name: each for name, each in weights.items() if each.is_floating_point()}, saved_buffers(model))
        # Zeros: whatever enters first with share 1 replaces them exactly.
        tensors = {name: torch.zeros_like(each, dtype=torch.float32) for name, each in live.tensors().items()}
        count = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
        return Average(type(self).__name__, tensors, count, start, live)

    @torch.no_grad()
    def __call__(self, state: TrainState, gate: Bool[Tensor, ""]) -> None:
        """Lets the weights enter `state.average` if `gate` is open and the step is due."""
        average, step = state.average, state.step + 1
        if average is None or step <= average.start or step % self.every:
            return
        averages = [local(tensor) for tensor in average.tensors.values()]
        weights = [local(tensor).float() for tensor in average.live.tensors().values()]
        differences = list(torch._foreach_sub(averages, weights))
        # An open gate promises finite weights, but only where a guard checks them; and a difference may overflow.
        finite = torch.stack(torch._foreach_norm(differences)).isfinite().all()
        enters = gate & finite
        torch._foreach_mul_(differences, self.share(average.count.float()))
        subtract_(averages, differences, torch.logical_not(enters).float())
        average.count.add_(enters)


@dataclass(frozen=True)
class EMA(Averaging):
    """Exponential moving average.

    Attributes:
        decay: d, in [0, 1). It forgets weights after about 1 / (1 - decay) updates times `every`.
        warmup: how slowly d rises to `decay`, at least 1; 1 uses `decay` from the start.
    """

    decay: float
    warmup: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise ConfigError(
                f"averaging.decay={self.decay} is outside [0, 1): at 1 the average would never move; fix: "
                "averaging.decay=0.999"
            )
        if not self.warmup >= 1:
            raise ConfigError(f"averaging.warmup={self.warmup} is below 1, which is none; fix: averaging.warmup=1")

    def share(self, entered: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Returns 1 - d; 1 for the first weights."""
        # 1 - (1 + n) / (warmup + n), without the cancellation that would cost half the digits of fp32
        rising = (self.warmup - 1) / (self.warmup + entered)
        return torch.where(entered == 0, 1.0, rising.clamp(min=1 - self.decay))


@dataclass(frozen=True)
class Snapshots(Averaging):
    """Mean of the weights of every `every`-th step.

    Attributes:
        start_share: share of the run's steps after which weights enter, in [0, 1).
    """

    start_share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.start_share < 1:
            raise ConfigError(
                f"averaging.start_share={self.start_share} is outside [0, 1): no weights would be averaged; fix: "
                "averaging.start_share=0.5"
            )

    def first(self, steps: int) -> int:
        """Returns the number of steps before the mean begins."""
        return int(self.start_share * steps)

    def share(self, entered: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Returns 1 / (n + 1)."""
        return 1 / (entered + 1)


def saved_buffers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns for each buffer that is averaged, by name, the buffers of its module.

    These are the floating-point buffers that are saved with the model, but masks and constants.
    """
    judged = {id(each) for each in buffers_of(model).judged if each.is_floating_point()}
    return {
        f"{path}.{name}" if path else name: module._buffers
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if id(buffer) in judged and name not in module._non_persistent_buffers_set
    }


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a sharded tensor, or any other tensor, without its graph."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # ty: ignore[not-callable]


@contextmanager
@torch.no_grad()
def averaged(average: Average) -> Generator[None]:
    """A context in which the model has its averaged weights; afterwards the live ones again, bit for bit.

    Before any weights have entered the average, these are the live ones. Takes the memory of the weights once more.
    """
    live = average.live.tensors()
    pairs = [(local(live[name]), local(tensor)) for name, tensor in average.tensors.items()]
    kept = [tensor.clone() for tensor, _ in pairs]
    begun = average.count > 0  # not read: the host need not know
    try:
        for tensor, mean in pairs:
            tensor.copy_(torch.where(begun, mean, tensor))
        yield
    finally:
        for (tensor, _), before in zip(pairs, kept, strict=True):
            tensor.copy_(before)
