"""`OwnLoop`: a training loop of the user's own, and its step: begin, judge, apply, hold, run again.

`Guard` runs the user's closures here; an attached loop (`attached_guard.py`) runs its own code, and only its update
passes through.
"""

import contextlib
import math
from collections.abc import Generator, Sequence
from operator import methodcaller
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.buffers import buffers_of
from stabletrain.errors import ConfigError
from stabletrain.guard.checks.comparing import sums
from stabletrain.guard.checks.copies import Copies
from stabletrain.guard.checks.repeats import NO_REPEAT, NoRepeat
from stabletrain.guard.checks.written import needs_closure, note_start
from stabletrain.guard.evaluations import Evaluations
from stabletrain.guard.generators import GeneratorStates
from stabletrain.guard.gradients import BareTensors, TrainedParameters, as_one
from stabletrain.guard.judge import Judge
from stabletrain.guard.loop_forecast import forecast_of_loop
from stabletrain.guard.loop_hooks import NOTHING, WeakHook
from stabletrain.guard.loop_states import Loader, LoopStates, NoStates
from stabletrain.guard.micro_batch import MicroBatch, loss_of
from stabletrain.guard.options import check_closure_options, make_precision
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.guard.rerun import BegunStep, Rerun, total
from stabletrain.guard.subject import compiled_frames
from stabletrain.parallel.loop import innermost
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Number, Reading, TrainState
from stabletrain.several_optimizers import optimizers_of
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.tracking.tracker import NoTracker


class LoadListener:
    """Notices every `load_state_dict` of a model, of its modules and of an optimizer.

    Attributes:
        noticed: whether one was called.
        after: the method that is called after one of the whole model; None for none.
    """

    def __init__(self) -> None:
        self.noticed, self._model = False, None
        self.after: WeakMethod | None = None

    def listen(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Notices the calls from now on."""
        self._model = ref(model)
        for module in model.modules():
            module.register_load_state_dict_post_hook(self)
        for each in optimizers_of(optimizer):
            each.register_load_state_dict_post_hook(self)

    def __call__(self, loaded: Any, *_: Any) -> None:
        """Is called after a `load_state_dict`."""
        self.noticed = True
        after = None if self.after is None or WeakHook.paused else self.after()
        if after is not None and self._model is not None and loaded is self._model():
            after()

    def __reduce__(self) -> Any:
        """Copies and pickles of a hooked model have a function that does nothing."""
        return NOTHING


class OwnLoop:
    """A loop whose closures the guard runs, and whose optimizer it steps.

    Attributes:
        outer: the model as the user gave it, with the wrappers of DDP and the compiler.
        model: the user's own module, without wrappers.
        optimizer, device: the optimizer (`SeveralOptimizers` if the user gave several), and where the parameters are.
        trained: the parameters that the optimizer updates.
        state: model and optimizer.
        steps: number of steps judged so far. Everything that is due every so many steps follows this count.
        policy: gives the verdicts.
        states: the snapshots to go back to.
        parallel: the ranks that train together.
        judge: measures and judges.
        forecast: predicts trouble from the applied steps.
        last_applied: the micro-batches of the last step that was applied; empty before the first.
        best_loss: smallest loss of the applied steps.
        frames: `compiled_frames()` when the guard was made.
        loads: notices that the loop loads weights or moments by itself.
        updating: whether the guard asked for the optimizer's step that is running.

    Args:
        tracker: receives events and lines.
        precision, scaler, loader, max_norm, forecast_every: see `Guard`.

    Raises:
        ConfigError: model and optimizer do not belong together, or `precision` cannot be used.
    """

    runs_closures = True
    """Whether the guard runs forward and backward; an attached loop does so itself."""

    def __init__(
        self,
        model: nn.Module | Sequence[Tensor],
        optimizer: Optimizer | Sequence[Optimizer],
        policy: SkipGuard,
        parallel: SingleProcess,
        tracker: NoTracker,
        *,
        precision: str | None = None,
        scaler: GradScaler | None = None,
        loader: Loader | None = None,
        max_norm: float | None = None,
        forecast_every: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            if not isinstance(model, list | tuple) or not all(isinstance(each, Tensor) for each in model):
                raise ConfigError(
                    f"Guard({type(model).__name__}, ...): give the nn.Module that is trained, or a list of tensors"
                )
            model = BareTensors(model)
        self.outer, self.model, self.optimizer = model, innermost(model), as_one(optimizer)
        self.trained = TrainedParameters(self.model, self.optimizer)
        self.device = self.parameters[0].device
        check_closure_options(self.optimizer, max_norm=max_norm, precision=precision, scaler=scaler)
        self.state, self.steps = TrainState(self.model, self.optimizer), 0
        self.policy, self.parallel = policy, parallel
        several_ranks = parallel.ranks.distributed
        chosen = make_precision(precision, scaler, self.device, self.optimizer, several_ranks=several_ranks)
        self.judge = Judge(
            self.model,
            self.optimizer,
            precision=chosen,
            parallel=parallel,
            policy=policy,
            max_norm=max_norm,
        )
        self.forecast = forecast_of_loop(forecast_every, self.state, self.judge, tracker)
        self.states = NoStates()
        if isinstance(policy, RollbackGuard):
            self.states = LoopStates(
                self.model, self.optimizer, policy, chosen, loader, tracker, self.forecast, parallel.any_rank
            )
        self.last_applied: list[MicroBatch] = []
        self.best_loss, self.updating, self._start_noted = math.inf, False, False
        self.frames = compiled_frames()
        self._generators = GeneratorStates(self.device)
        self.loads = LoadListener()
        self.loads.listen(self.model, self.optimizer)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that the optimizer updates, in the order of `model.parameters()`."""
        return self.trained.found

    @property
    def precision(self) -> FullPrecision:
        """Autocast and the loss scale."""
        return self.judge.precision

    # ---- begin

    def begin(self) -> BegunStep:
        """Begins a step: records the state that forward and backward change; if closures follow, drops gradients."""
        # The loop may have loaded a checkpoint or added parameters since the last step.
        if self.trained.find() or self.loads.noticed:
            self.state_replaced()
        # Note what is not finite from the start, so that no step is blamed for it.
        if not self._start_noted:
            note_start(self.model, self.optimizer)
            self._start_noted = True
        self.states.before_first_update(self.steps)
        if self.runs_closures:
            self.optimizer.zero_grad(set_to_none=True)
        # A held step restores the buffers, such as batch norm's statistics; a rerun draws the same random numbers.
        return BegunStep(self._generators.now(), buffers_of(self.model).save())

    def state_replaced(self) -> None:
        """Discards checksums and snapshots, because the loop itself has changed weights, moments or buffers."""
        self.loads.noticed = False
        self.states.lengths = []  # of the weights before: the next step's cannot be compared with them
        self.policy.states.forget()
        self.policy.check_state_every(self.policy.state_check.every)
        self._start_noted = False

    # ---- judge

    def state_changed(self, begun: BegunStep) -> Number:
        """Returns 1 if weights, moments or buffers have changed since the last update, else 0."""
        return self.policy.state_check.before_update(self.state, begun.buffers)

    # ---- apply

    def apply(self, begun: BegunStep, reading: Reading) -> Reading:
        """Applies the update if the gate is open, and undoes it if it is not finite.

        Returns:
            the reading, changed if the update was undone, or repeated.
        """
        if not reading.applied:
            return reading
        lengths = self.policy.lengths
        before, kept = lengths.before(self.model), self.copies()
        with self.forecast.measuring(), self.update(kept):
            repeat = self._repeat_of_update()
            if needs_closure(self.optimizer):
                self.run_optimizer_step(self.optimizer, begun)
            else:
                self.precision.step(self.optimizer)
            difference = repeat.update(methodcaller("step"))
        if not self.keep_or_undo(kept):
            return self.undone(begun, reading)
        self.precision.update(overflow=False, applied=True)
        # How far the update moved the weights: a slow spike shows there first. Read with the next step's numbers.
        self.states.lengths = [*lengths.after(before).values()]
        return reading if repeat is NO_REPEAT else reading._replace(recheck_update=float(difference))

    def _repeat_of_update(self) -> NoRepeat:
        """Returns what repeats the update of one tensor, if that is due."""
        if self.parallel.ranks.distributed:
            return NO_REPEAT
        self.state.step = self.steps - 1  # this step's number, counted from 0
        return self.policy.recheck.of_update(self.state, self.parallel)

    def undone(self, begun: BegunStep, reading: Reading) -> Reading:
        """Returns the reading of a step whose update was undone. It may be applied again, so the buffers are saved."""
        begun.after_forward = buffers_of(self.model).save()
        return reading._replace(applied=False, bad_update=True)

    def run_optimizer_step(self, optimizer: Optimizer, begun: BegunStep) -> None:
        """Runs the step of the optimizer, or of one of several, without judging it."""
        if needs_closure(optimizer):
            optimizer.step(Evaluations(self.parameters, begun.loss, lambda: total(self.evaluate(begun))))
        else:
            optimizer.step()

    def evaluate(self, begun: BegunStep) -> list[Tensor]:
        """Runs forward and backward of a step's closures at the present weights; returns their losses, detached."""
        losses: list[Tensor] = []
        self.optimizer.zero_grad(set_to_none=True)
        for micro_batch in begun.micro_batches:
            with begun.entered(), self.precision.autocast():  # `update` may be called outside the loop's autocast
                loss = loss_of(micro_batch())
            self.precision.scale(loss).backward()
            losses.append(loss.detach())
        return losses

    def copies(self) -> Copies | None:
        """Returns copies of what the update may write, to check and undo it; None if it is proven to stay finite."""
        return self.policy.update_check.copy(self.model, self.optimizer) if self.judge.unproven else None

    @contextlib.contextmanager
    def update(self, kept: Copies | None = None) -> Generator[None]:
        """A context in which the optimizer's step runs, with a lower learning rate for a while after a rollback.

        If the step raises an error, `kept` is put back, so that no partial update remains.
        """
        factor = self.policy.lr_multiplier(self.steps - 1)  # this step's number, counted from 0
        groups = [group for group in self.optimizer.param_groups if factor != 1.0 and "lr" in group]
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        self.updating = True  # `check_caller` lets this step pass
        try:
            yield
        except BaseException:
            if kept is not None:
                kept.put_back()
            raise
        finally:
            self.updating = False
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def keep_or_undo(self, kept: Copies | None) -> bool:
        """Returns whether the update that was just applied is finite, on all ranks; if not, undoes it."""
        if kept is None or not self.parallel.any_rank(not kept.are_finite_now()):
            return True
        kept.put_back()
        return False

    # ---- hold

    def hold(self, begun: BegunStep, reading: Reading) -> None:
        """Restores the buffers of a held step, and lowers the loss scale after an overflow.

        Weights and moments are untouched, and the forward pass wrote only buffers.
        """
        begun.buffers.put_back()
        self.precision.update(reading.overflow, applied=False)

    def note_applied(self, begun: BegunStep, reading: Reading) -> None:
        """Keeps what later investigations need of an applied step: its batches, and the smallest loss."""
        self.best_loss = min(self.best_loss, reading.loss)
        if not self.policy.left_out:  # a step with fewer samples cannot stand in for a whole one
            self.last_applied = begun.micro_batches

    def remember_state(self) -> None:
        """Takes the checksums of the state after a step, if they are wanted."""
        if self.policy.state_check.every:
            self.state.step = self.state.executed_steps = self.steps
            self.policy.state_check.after_update(self.state, buffers_of(self.model).save())

    # ---- run again

    def gap(self, begun: BegunStep) -> str:
        """Returns why the closures do not compute the loop's own loss; empty if they do."""
        return ""

    def rerun(self, begun: BegunStep, loss_scale: float) -> Rerun:
        """Returns what is needed to run a step's closures again, which leaves no trace."""
        return Rerun(self.model, self.outer, self.parameters, self.precision, begun, loss_scale)

    def can_take_again(self, begun: BegunStep, reading: Reading) -> bool:
        """Returns whether the update can be applied again, or the closures run again on unchanged batches."""
        if self.parallel.ranks.distributed:
            return False
        return reading.bad_update or (self.runs_closures and not begun.batches_changed)

    def take_again(self, begun: BegunStep, reading: Reading) -> Reading:
        """Takes a held step again, because its numbers were wrong and have changed nothing; returns its numbers.

        If the update was wrong, it is applied again. Otherwise the closures run twice more, and the gradients of both
        runs must have the same bits.
        """
        with begun:
            if reading.bad_update:
                if begun.after_forward is not None:
                    begun.after_forward.put_back()
                self.precision.unscaled_again()
                return self.apply(begun, reading._replace(applied=True, bad_update=False))
            self.policy.recheck.forget()  # its comparison is of the first try
            first, second = self._compute_again(begun), self._compute_again(begun)
            differs = torch.full((), 0.0 if torch.equal(first, second) else math.inf, device=self.device)
            return self.apply(begun, self.judge(reading.step, begun.loss, self.parameters, recheck=differs))

    def take_without(self, begun: BegunStep, reading: Reading, micro_batches: list[MicroBatch]) -> Reading:
        """Takes a held step again with the micro-batches that are left of it; returns its numbers."""
        with begun:
            begun.micro_batches = micro_batches
            self.policy.recheck.forget()  # its comparison is of the first try
            self._compute_again(begun)
            return self.apply(begun, self.judge(reading.step, begun.loss, self.parameters))

    def _compute_again(self, begun: BegunStep) -> Tensor:
        """Runs the closures of a step from where it began; returns the sums of the gradients' bits."""
        begun.buffers.put_back()
        begun.generators.set()
        begun.losses = self.evaluate(begun)
        return sums([parameter.grad for parameter in self.parameters], self.device)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Returns counts, limits and loss scale, for the loop's own checkpoint."""
        return {
            "step": self.steps,
            "policy": self.policy.state_dict(),
            "scaling": self.precision.state_dict(),
            "lengths": [float(length) for length in self.states.lengths],
            "best_loss": self.best_loss,
            "forecast": self.forecast.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them."""
        self.steps = state["step"]
        self.policy.load_state_dict(state["policy"])
        # The loop loads its weights and moments too: checksums of those from before would report a memory fault.
        self.state_replaced()
        self.precision.load_state_dict(state["scaling"])
        self.states.lengths = [torch.tensor(length, device=self.device) for length in state.get("lengths", [])]
        self.best_loss = state.get("best_loss", math.inf)
        self.forecast.load_state_dict(state.get("forecast", {}))
