"""The roles in a step, each played by the object that a config group chooses; the step does not know its kind."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from stabletrain.buffers import SavedBuffers
from stabletrain.records import Batch, Clipped, Detour, GradNorms, LossTerms, Number, Reading, StepChecks, Verdict


@runtime_checkable
class Precision(Protocol):
    """Number format of forward and backward, and the loss scale; see `stability/precision/`."""

    def autocast(self) -> AbstractContextManager: ...
    def scale(self, loss: Tensor) -> Tensor: ...
    def unscale_(self, gradients: list[Tensor]) -> None: ...
    def loss_scale(self) -> Number: ...
    def overflow(self, terms: LossTerms, norms: GradNorms) -> Tensor | bool: ...
    def close(self, gate: Tensor, overflow: Tensor | bool) -> Tensor: ...
    def update(self, overflow: Tensor | bool, applied: Tensor) -> None: ...


@runtime_checkable
class Objective(Protocol):
    """The loss, computed from whole logits or in chunks; see `stability/objective.py`, `chunked_loss.py`."""

    @property
    def plain(self) -> "Objective": ...
    def wrap(self, forward: Callable[..., Tensor], model: nn.Module, tools: "Tools") -> Callable[[Tensor], Any]: ...
    def __call__(self, logits: Any, targets: Tensor, n_valid: Tensor) -> LossTerms: ...


@runtime_checkable
class Clipping(Protocol):
    """Clips gradients; see `stability/clipping/`. Skipped steps must not enter its statistics."""

    def __call__(self, model: nn.Module, norms: GradNorms, gate: Tensor) -> Clipped: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict, /) -> None: ...


@runtime_checkable
class AfterUpdate(Protocol):
    """Bounds the weights after an update; see `stability/qkclip.py`."""

    def maxima(self, model: nn.Module) -> list[Tensor]: ...
    def __call__(self, model: nn.Module, gate: Tensor) -> None: ...


@runtime_checkable
class RetainedStates(Protocol):
    """The states a rollback may restore, by step number; see `stability/guard/retained.py`."""

    @property
    def steps(self) -> list[int]: ...
    @property
    def target(self) -> int | None: ...
    def due(self, step: int) -> bool: ...
    def retain(self, step: int, healthy: bool) -> None: ...
    def forget(self) -> None: ...


@runtime_checkable
class GuardPolicy(Protocol):
    """Decides which updates reach the weights, and what happens after a skip; see `stability/guard/`."""

    skips: dict[str, int]
    kind: str
    reason: str
    consecutive: int
    rollbacks: int

    @property
    def bounds(self) -> tuple[float, float]: ...
    @property
    def note(self) -> str: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def states(self) -> RetainedStates: ...
    def gate(self, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Tensor: ...
    def judge(self, reading: Reading) -> Verdict: ...
    def at_end(self, verdict: Verdict) -> Verdict: ...
    def distrust(self, why: str) -> Verdict: ...
    def trouble_at_end(self) -> str | None: ...
    def lr_multiplier(self, step: int) -> float: ...
    def begin_anew(self, loss: float | None) -> None: ...
    def begin_rollback(self, step: int, target: int, same_data: bool = False) -> Detour: ...


@runtime_checkable
class Sanitizer(Protocol):
    """Replaces values in a batch that no model can learn from, and reports them; see `stability/sanitize.py`."""

    @property
    def vocab_size(self) -> int | None: ...
    def safe(self, batch: Batch, classes: int) -> Batch: ...
    def inputs(self, inputs: Tensor) -> tuple[Tensor, Number, Tensor | bool]: ...
    def targets(self, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]: ...


@runtime_checkable
class Parallel(Protocol):
    """The ranks that train together, or one process; see `parallel/`."""

    def wrapped(self, model: nn.Module) -> nn.Module: ...
    def gradient_sync(self, model: nn.Module, last: bool) -> AbstractContextManager: ...
    def scale_for_averaging(self, loss: Tensor) -> Tensor: ...
    def average_buffers_(self, model: nn.Module, held: SavedBuffers) -> None: ...
    def max_over_ranks_(self, values: list[Tensor]) -> None: ...
    def reduce_stats(
        self, terms: LossTerms, norms: GradNorms, checks: StepChecks
    ) -> tuple[LossTerms, GradNorms, StepChecks]: ...
    def all_reduce_sum(self, values: Tensor) -> Tensor: ...


@runtime_checkable
class Seeding(Protocol):
    """Seeds the randomness of a step; see `machine/determinism.py`."""

    def seed_step(self, seed: int, step: int) -> None: ...


@runtime_checkable
class LearningRate(Protocol):
    """Learning rate as a fraction of its peak, by step number; see `stability/schedule.py`."""

    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class Tools:
    """Everything that acts in a step."""

    sanitizer: Sanitizer
    precision: Precision
    objective: Objective
    clipping: Clipping
    after_update: AfterUpdate
    guard: GuardPolicy
    learning_rate: LearningRate
    determinism: Seeding
    seed: int
    parallel: Parallel

    def wrap(self, model: nn.Module) -> Callable[[Tensor], Any]:
        """Returns the model as a step calls it: `logits = wrapped(inputs)`.

        With DDP this is its wrapper, which averages the gradients. With `loss_chunk` the head is left to the loss.
        """
        return self.objective.wrap(self.parallel.wrapped(model), model, self)

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss to differentiate: times the loss scale, and times the world size, since DDP averages."""
        return self.precision.scale(self.parallel.scale_for_averaging(loss))
