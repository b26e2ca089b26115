"""The guard of a loop that cannot be edited: what `Guard.attach` returns."""

import contextlib
import math
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.buffers import buffers_of
from stabletrain.errors import ConfigError
from stabletrain.guarded.attach import Attached, InStep
from stabletrain.guarded.gradients import gradients, measure
from stabletrain.guarded.guard import Guard, undone_if_raised
from stabletrain.guarded.part import Part
from stabletrain.guarded.rerun import Begun
from stabletrain.records import Reading

CLIPPED = (
    "every gradient holds NaN or Inf: if the loop clips by the norm before optimizer.step(), one bad gradient has "
    "spread to all"
)


class AttachedGuard(Guard):
    """Guards a loop that calls `optimizer.step()` itself; see `Guard.attach`.

    Raises:
        ConfigError: `precision` or `max_norm` is given, which the loop itself does.
    """

    updates = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        criterion: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        if criterion is not None and not isinstance(criterion, nn.Module):
            raise ConfigError(
                f"Guard.attach(criterion={criterion!r}) is not an nn.Module, such as nn.CrossEntropyLoss(): what a "
                "function returns cannot be seen; leave it out"
            )
        for name in ("precision", "max_norm"):
            if options.pop(name, None) is not None:
                raise ConfigError(f"Guard.attach({name}=...): the loop itself does that; leave it out")
        if options.get("recheck_every"):
            raise ConfigError(
                "Guard.attach(recheck_every=...): only a closure can be run again; use Guard and guard.step"
            )
        super().__init__(model, optimizer, **options)
        optimizer = self._optimizer
        self._judge.scaling = InStep(self._scaling.precision, "fp16" if scaler is not None else "", optimizer, scaler)
        self._pending: tuple[Begun, Reading] | None = None
        self._attached = Attached(
            self._outer, optimizer, scaler, criterion, self._begin, self._decide, self._loops_update
        )

    def backward(self, closure: Callable[..., Any], batch: Any = None) -> Tensor:
        """Raises ConfigError: the loop itself runs forward and backward."""
        raise ConfigError("this guard is attached to optimizer.step(): use Guard(model, optimizer) for guard.step()")

    # ---- what an adapter tells

    def before_forward(self, batch: Any, *, first: bool) -> None:
        """Tells that the loop begins a micro-batch of which `record` will tell.

        Without it, the guard notices the first call of the model's own `forward`.

        Args:
            batch: as for `Guard.step`.
            first: whether it is the first micro-batch of its step.
        """
        self._attached.before_forward(batch, first)

    def record(self, closure: Callable[..., Any], batch: Any, loss: Tensor) -> None:
        """Tells how the loop computed the loss of one micro-batch, so that it can be run again.

        Args:
            closure, batch: as for `Guard.step`. They are not run now.
            loss: what the loop got, a scalar.
        """
        self._attached.record(Part(closure, batch), loss)

    def before_clipping(self) -> None:
        """Measures the gradients of a loop that is about to clip them: the step is judged by these norms.

        Call it when the gradients are unscaled.
        """
        self._attached.unclipped = measure(gradients(self._parameters), [])[0]

    def detach(self) -> None:
        """Ends what `attach` began: the optimizer steps as it did before."""
        self._attached.detach()

    # ---- a step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it. Load model and optimizer before: their state is what a withheld step goes back to."""
        super().load_state_dict(state)
        self._attached.take()
        self._attached.end_step()

    def _decide(self, loss: Tensor | None) -> bool:
        """Judges a step; returns whether its update is applied.

        Args:
            loss: what the loop's own closure returned; None if it has none.
        """
        self._look_at_parameters()
        found, attached = gradients(self._parameters), self._attached
        recorded, seen, begun = attached.recorded, attached.seen_loss(), attached.take()
        if not found and not self._policy.update_check.why(self._optimizer):
            return True  # nothing is updated
        if loss is None or (recorded and begun.losses):
            loss = sum(begun.losses[1:], begun.losses[0]) if begun.losses else torch.zeros((), device=self._device)
        if not recorded:
            loss = loss + seen.to(loss.device)
        unclipped, changed = attached.norms_before_clipping, self._changed(begun)
        reading = self._judged(self._step + 1, loss.detach(), unclipped=unclipped, changed=changed)
        spread = not recorded and not math.isfinite(reading.grad_norm) and not self.skipped
        if spread and all(not bool(each.isfinite().all()) for each in found):
            self._incidents.note(CLIPPED)
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
        with undone_if_raised(kept), self._lowered_rate():
            yield
        if not self._stays(kept):
            begun, reading = self._pending
            begun.after_forward = buffers_of(self._model).save()
            self._pending = begun, reading._replace(applied=False, bad_update=True)
        self._end()

    def _apply(self) -> bool:
        """Applies the loop's update once more, after one that was undone; returns whether it stays."""
        kept = self._copies()
        with undone_if_raised(kept), self._lowered_rate():
            self._run_own_step()
        return self._stays(kept)

    def _run_own_step(self) -> None:
        """Runs the optimizer's step as it was before `attach`."""
        self._attached.run_own_step()

    def _end(self) -> None:
        """Judges the step, after its update was applied or withheld, and follows the verdict."""
        assert self._pending is not None
        (begun, reading), self._pending = self._pending, None
        self._attached.watching = False
        try:
            self._conclude(begun, reading)
        finally:
            self._end_step()
            self._attached.watching = True
            self._attached.end_step()

    def _gap(self, begun: Begun) -> str:
        """Returns why the loop's own loss cannot be computed again; empty if it can."""
        return self._attached.gap(begun)
