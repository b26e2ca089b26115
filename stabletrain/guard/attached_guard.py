"""The guard of a loop that cannot be edited: what `Guard.attach` returns."""

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.guard.attach import LoopRecorder
from stabletrain.guard.gradients import gradients, measure
from stabletrain.guard.loop_guard import LoopGuard
from stabletrain.guard.micro_batch import MicroBatch
from stabletrain.guard.options import GuardOptions
from stabletrain.guard.rerun import BegunStep
from stabletrain.records import Reading
from stabletrain.stability.precision.loop import LoopScaled

CLIPPED_NAN = (
    "every gradient holds NaN or Inf: if the loop clips by the norm before optimizer.step(), one bad gradient has "
    "spread to all"
)


class AttachedGuard(LoopGuard):
    """Guards a loop that calls `optimizer.step()` itself; see `Guard.attach`.

    Raises:
        ConfigError: `precision` or `max_norm` is given, which the loop itself does.
    """

    updates = False

    def __init__(
        self,
        model: nn.Module | Sequence[Tensor],
        optimizer: Optimizer,
        options: GuardOptions,
        *,
        scaler: GradScaler | None = None,
        criterion: Callable[..., Any] | None = None,
    ) -> None:
        if criterion is not None and not isinstance(criterion, nn.Module):
            raise ConfigError(
                f"Guard.attach(criterion={criterion!r}) is not an nn.Module, such as nn.CrossEntropyLoss(): what a "
                "function returns cannot be seen; leave it out"
            )
        for name in ("precision", "max_norm"):
            if getattr(options, name) is not None:
                raise ConfigError(f"Guard.attach({name}=...): the loop itself does that; leave it out")
        if options.recheck_every:
            raise ConfigError(
                "Guard.attach(recheck_every=...): only a closure can be run again; use Guard and guard.step"
            )
        super().__init__(model, optimizer, options)
        optimizer = self._optimizer
        self._judge.precision = LoopScaled(self._device, optimizer, scaler)
        self._pending: tuple[BegunStep, Reading] | None = None
        self._recorder = LoopRecorder(
            self._outer, optimizer, scaler, criterion, self._begin, self._decide, self._loops_update
        )

    def step(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Raises ConfigError: the loop itself runs forward and backward."""
        raise ConfigError("this guard is attached to optimizer.step(): use Guard(model, optimizer) for guard.step()")

    backward = update = step

    # ---- called by an adapter

    def before_forward(self, batch: Any, *, first: bool) -> None:
        """Notes that the loop begins a micro-batch that it will `record`.

        Without it, the guard notices the first call of the model's own `forward`.

        Args:
            batch: as for `Guard.step`.
            first: whether it is the first micro-batch of its step.
        """
        self._recorder.before_forward(batch, first)

    def record(self, closure: Callable[..., Any], batch: Any, loss: Tensor) -> None:
        """Records how the loop computed the loss of one micro-batch, so that it can be run again.

        Args:
            closure, batch: as for `Guard.step`. They are not run now.
            loss: the loop's own, a scalar.
        """
        self._recorder.record(MicroBatch(closure, batch), loss)

    def before_clipping(self) -> None:
        """Measures the gradients of a loop that is about to clip them: the step is judged by these norms.

        Call it when the gradients are unscaled.
        """
        self._recorder.unclipped = measure(gradients(self._parameters), [])[0]

    def detach(self) -> None:
        """Undoes `attach`: the optimizer steps as it did before."""
        self._recorder.detach()

    # ---- a step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it. Load model and optimizer before: a withheld step goes back to their state."""
        super().load_state_dict(state)
        self._recorder.take()
        self._recorder.end_step()

    def _decide(self, loss: Tensor | None) -> bool:
        """Judges a step; returns whether its update is applied.

        Args:
            loss: returned by the loop's own closure; None if it has none.
        """
        self._find_parameters()
        found, recorder = gradients(self._parameters), self._recorder
        recorded, seen, begun = recorder.recorded, recorder.seen_loss(), recorder.take()
        if not found and not self._policy.update_check.why(self._optimizer):
            return True  # nothing is updated
        # The loss that counts: recorded by an adapter, or returned by the model; 0 if unknown, so that the gradients
        # alone are judged. NaN in a loss that was only seen is added.
        if loss is None or (recorded and begun.losses):
            loss = sum(begun.losses[1:], begun.losses[0]) if begun.losses else torch.zeros((), device=self._device)
        if not recorded:
            loss = loss + seen.to(loss.device)
        unclipped, changed = recorder.norms_before_clipping, self._state_changed(begun)
        reading = self._judge_step(self._step + 1, loss.detach(), unclipped=unclipped, changed=changed)
        spread = not recorded and not math.isfinite(reading.grad_norm) and not self.skipped
        if spread and all(not bool(each.isfinite().all()) for each in found):
            self._incidents.note(CLIPPED_NAN)
        # The loop applies the update in `_loops_update`, which also ends the step; a withheld step ends here.
        self._pending = begun, self._count(reading)
        if not reading.applied:
            self._end()
        return reading.applied

    @contextlib.contextmanager
    def _loops_update(self) -> Generator[None]:
        """A context in which the loop applies its update, which is undone if it is not finite."""
        if self._pending is None:  # there was nothing to judge
            yield
            return
        kept = self._copies()
        with self._update(kept):
            yield
        if not self._keep_or_undo(kept):
            begun, reading = self._pending
            self._pending = begun, self._undone(begun, reading)
        self._end()

    def _apply(self) -> bool:
        """Applies the loop's update once more, after one that was undone; returns whether it stays."""
        kept = self._copies()
        with self._update(kept):
            self._run_optimizer_step()
        return self._keep_or_undo(kept)

    def _run_optimizer_step(self) -> None:
        self._recorder.run_own_step()

    def _end(self) -> None:
        """Follows the verdict on the step, after its update was applied or withheld."""
        assert self._pending is not None
        (begun, reading), self._pending = self._pending, None
        self._recorder.watching = False  # forward calls of a rerun are not the loop's
        try:
            self._follow(begun, reading)
        finally:
            self._end_step()
            self._recorder.watching = True
            self._recorder.end_step()

    def _gap(self, begun: BegunStep) -> str:
        return self._recorder.gap(begun)
