"""The guard of a loop that cannot be edited: what `Guard.attach` returns."""

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.forensics.rerun import is_compiled
from stabletrain.guard.attach import LoopRecorder
from stabletrain.guard.gradients import gradients, measure, summed_gradients
from stabletrain.guard.live_trace import TRACED_STEPS
from stabletrain.guard.loop_guard import LoopGuard
from stabletrain.guard.loop_hooks import not_watched
from stabletrain.guard.micro_batch import MicroBatch
from stabletrain.guard.own_loop import OwnLoop
from stabletrain.guard.rerun import BegunStep
from stabletrain.guard.subject import compiled_frames
from stabletrain.records import Reading
from stabletrain.stability.precision.loop import LoopScaled

CLIPPED_NAN = (
    "every value of every gradient is NaN, and the loop has changed the gradients in place: if that is clipping by the "
    "norm, one bad gradient has spread to all"
)


class AttachedLoop(OwnLoop):
    """A loop that runs its own code, and steps its optimizer itself.

    Attributes:
        recorder: records the loop's forward calls; set by the guard.
    """

    runs_closures = False
    recorder: LoopRecorder

    def apply(self, begun: BegunStep, reading: Reading) -> Reading:
        """Applies the loop's update once more, after one that was undone; returns the reading, changed if undone."""
        kept = self.copies()
        with self.forecast.measuring(), self.update(kept):
            self.recorder.run_own_step()
        return reading if self.keep_or_undo(kept) else self.undone(begun, reading)

    def run_optimizer_step(self, optimizer: Optimizer, begun: BegunStep) -> None:
        """Runs the optimizer's own step, without judging it."""
        self.recorder.run_own_step()

    def gap(self, begun: BegunStep) -> str:
        """Returns why the recorded calls do not compute the loop's own loss; empty if they do."""
        return self.recorder.gap(begun)


class AttachedGuard(LoopGuard):
    """Guards a loop that calls `optimizer.step()` itself; see `Guard.attach`.

    Raises:
        ConfigError: `precision` or `max_norm` is given, which the loop itself does.
    """

    loop_type = AttachedLoop
    updates = False

    def __init__(
        self,
        model: nn.Module | Sequence[Tensor],
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        **options: Any,
    ) -> None:
        for name in ("precision", "max_norm"):
            if options.get(name):
                raise ConfigError(f"Guard.attach({name}=...): the loop itself does that; leave it out")
        if options.get("recheck_every"):
            raise ConfigError(
                "Guard.attach(recheck_every=...): only a closure can be run again; use Guard and guard.step"
            )
        if isinstance(optimizer, list | tuple):
            raise ConfigError(
                "Guard.attach(model, [...]): the loop steps one optimizer after the other, so the first has moved its "
                "weights when the second is judged; attach a guard to each, or use Guard(model, [...]) and guard.step"
            )
        if "all_but_guilty" in (options.get("keep"), getattr(options.get("policy"), "keep", "")):
            raise ConfigError(
                "Guard.attach(keep='all_but_guilty'): only a closure can be run without some samples; use Guard and "
                "guard.step(closure, batch=...)"
            )
        super().__init__(model, optimizer, **options)
        loop = self._loop
        assert isinstance(loop, AttachedLoop)
        loop.judge.precision = LoopScaled(loop.device, loop.optimizer, scaler)
        self._traces = True  # whether steps are traced after a fault that could not be named
        self._pending: tuple[BegunStep, Reading] | None = None
        self._recorder = loop.recorder = LoopRecorder(
            loop.outer, loop.optimizer, scaler, loop.begin, self._decide, self._loops_update
        )
        loop.loads.after = WeakMethod(self._after_loading)

    def _after_loading(self) -> None:
        """Records the loaded state, for a loop whose forward calls are not seen."""
        if self._recorder.begun is None:
            self._recorder.end_step()

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

    def record_calls_of(self, module: nn.Module) -> None:
        """Records the forward calls of a part of the model that the loop calls by itself."""
        self._recorder.record_calls_of(module)

    def use_scaler(self, scaler: GradScaler) -> None:
        """Makes the loop's `GradScaler` known, if it was not when the guard was attached."""
        self._loop.judge.precision = LoopScaled(self._loop.device, self._loop.optimizer, scaler)
        self._recorder.use_scaler(scaler)

    @property
    def stepping(self) -> bool:
        """Whether the optimizer's step is running under this guard."""
        return self._recorder.stepping

    def before_clipping(self) -> None:
        """Measures the gradients of a loop that is about to clip them: the step is judged by these norms.

        Call it when the gradients are unscaled.
        """
        parameters = self._loop.parameters
        self._recorder.unclipped = measure(summed_gradients(parameters, gradients(parameters)), [])[0]

    def detach(self) -> None:
        """Undoes `attach`: the optimizer steps as it did before."""
        self._recorder.detach()

    # ---- a step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it. Load model and optimizer before: a held step goes back to their state."""
        super().load_state_dict(state)
        self._recorder.take()
        self._recorder.end_step()

    def _decide(self, loss: Tensor | None) -> bool:
        """Judges a step; returns whether its update is applied.

        Args:
            loss: returned by the loop's own closure; None if it has none.
        """
        loop, recorder = self._loop, self._recorder
        if loop.trained.find() or loop.loads.noticed:
            loop.state_replaced()
        found = gradients(loop.parameters)
        recorded = recorder.recorded
        begun, known = recorder.take()
        if not found and not loop.policy.update_check.why(loop.optimizer):
            return True  # nothing is updated
        # The loss that counts: recorded by an adapter, or what the loop differentiated. 0 if it is unknown, so that the
        # gradients alone are judged.
        loss = known if known is not None else torch.zeros(()) if loss is None else loss
        begun.losses = [loss.detach().to(loop.device)]
        unclipped, changed = recorder.norms_before_clipping, loop.state_changed(begun)
        reading = loop.judge(
            loop.steps + 1,
            begun.loss,
            loop.parameters,
            unclipped=unclipped,
            changed=changed,
            lengths=loop.states.lengths,
        )
        spread = not recorded and not math.isfinite(reading.grad_norm) and not self.skipped
        # The backward pass gives new tensors: without clipping nothing has written to them since.
        if spread and all(each._version and not bool(each.isfinite().any()) for each in found):
            self._tracker.note(CLIPPED_NAN)
        # The loop applies the update in `_loops_update`, which also ends the step; a held step ends here.
        self._count(reading)
        if not reading.applied:
            self._end(begun, reading)
            return False
        self._pending = begun, reading
        return True

    @contextlib.contextmanager
    def _loops_update(self) -> Generator[None]:
        """A context in which the loop applies its update, which is undone if it is not finite."""
        pending, self._pending = self._pending, None
        if pending is None:  # there was nothing to judge
            yield
            return
        loop, (begun, reading) = self._loop, pending
        lengths = loop.policy.lengths
        before, kept = lengths.before(loop.model), loop.copies()
        with begun, loop.forecast.measuring(), loop.update(kept):
            yield
        if loop.keep_or_undo(kept):
            loop.states.lengths = [*lengths.after(before).values()]
        else:
            reading = loop.undone(begun, reading)
        self._end(begun, reading)

    def _end(self, begun: BegunStep, reading: Reading) -> None:
        """Follows the verdict on the step, after its update was applied or held."""
        recorder, incidents = self._recorder, self._incidents
        incidents.newest = None
        try:
            with not_watched():
                self._follow(begun, reading)
        finally:
            self._end_step()
            recorder.end_step()
        if reading.applied or self._loop.policy.kind != "nonfinite":
            return
        unnamed = incidents.newest is not None and incidents.newest.cause == "unknown" and bool(recorder.gap(begun))
        if begun.trace is not None:  # a fault has come again; if the trace does not show it, another one will not
            recorder.live.disarm()
            self._traces = not unnamed
        elif unnamed and self._traces and self._can_be_traced():
            recorder.live.arm()
            self._tracker.note(
                f"the next {TRACED_STEPS} steps are traced while they run, which is slow, so that the operation is "
                "named if this comes again"
            )

    def _can_be_traced(self) -> bool:
        """Returns whether the loop's own steps can be traced: in one process, and not compiled."""
        loop = self._loop
        compiled = compiled_frames() > loop.frames or any(map(is_compiled, loop.outer.modules()))
        return not compiled and not loop.parallel.ranks.distributed
