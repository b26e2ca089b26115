"""`LoopGuard`: follows the verdict on each step of a user's training loop.

What `Guard` and `AttachedGuard` share. They differ in who runs a step: `Guard` runs the user's closures, an attached
loop runs its own code. `own_loop.py` has the step itself: begin, judge, apply or hold. `engine.py` gives the verdict;
it sees the step as a `LoopStep`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, ClassVar, NoReturn, SupportsIndex
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.extension import Prediction
from stabletrain.forensics.handler import IncidentSummary
from stabletrain.forensics.investigate import IncidentRequest
from stabletrain.forensics.probes.update import UpdateFault, update_fault
from stabletrain.forensics.rerun import RerunResult
from stabletrain.guard.checks.comparing import Compared, sums
from stabletrain.guard.engine import note_taken_again, settle
from stabletrain.guard.guilty import Counts, Sample
from stabletrain.guard.incidents import Incidents, settings
from stabletrain.guard.loop_mistakes import ScaledClipping, watch_for_lost_moments
from stabletrain.guard.micro_batch import MicroBatch
from stabletrain.guard.options import check_loader, check_numbers, make_policy
from stabletrain.guard.own_loop import OwnLoop
from stabletrain.guard.policy import SkipGuard
from stabletrain.guard.read_step import ReadStep
from stabletrain.guard.reports import LoopTracker, log_alarms, log_predictions
from stabletrain.guard.rerun import BegunStep
from stabletrain.guard.samples import sample_count, without_samples
from stabletrain.guard.subject import LoopSubject
from stabletrain.monitors.rolling import Alarm
from stabletrain.parallel.loop import ranks_of_loop, rebuild_buckets
from stabletrain.records import GradNorms, LossTerms, RankPart, Reading, StepChecks, Verdict
from stabletrain.several_optimizers import optimizers_of
from stabletrain.tracking.tracker import NoTracker


class LoopStep(ReadStep):
    """A step of a user's own loop, which is run again by calling its closures.

    Attributes:
        loop: the loop.
        begun: the state before the step, with its closures.
    """

    def __init__(
        self, loop: OwnLoop, begun: BegunStep, reading: Reading, number: int, tracker: NoTracker, incidents: Incidents
    ) -> None:
        super().__init__(
            reading, number, loop.steps, loop.state, loop.device, loop.policy, loop.parallel, tracker, incidents.handler
        )
        self.loop, self.begun, self.incidents = loop, begun, incidents
        self.traced = begun.trace is not None

    def investigate(self, kind: str, reading: Reading) -> IncidentSummary | None:
        """See `ReadStep`."""
        loop = self.loop
        rebuild_buckets(loop.outer)
        subject = self._subject(reading)
        groups = [each.param_groups[0] for each in optimizers_of(loop.optimizer)]
        known = settings(loop.precision.name, groups, clips=loop.judge.clips, best_loss=loop.best_loss)
        optimizer = None if subject.sharded else loop.optimizer  # no rank holds whole moments
        return self.incidents.investigate(subject, IncidentRequest(kind, optimizer, loop.policy.bounds), known)

    def _subject(self, reading: Reading) -> LoopSubject:
        """Collects everything that an investigation of the step needs."""
        loop, begun, own = self.loop, self.begun, None
        if self.parallel.ranks.distributed:
            own = RankPart(self.parallel.ranks.rank, float(begun.loss))
        return LoopSubject(
            loop.rerun(begun, reading.loss_scale),
            reading._replace(step=self.number),
            self.reading.step - 1,
            usual=loop.last_applied,
            older=lambda: loop.states.older(self.reading.step - 2),
            part=own,
            sharded=any(hasattr(parameter, "to_local") for parameter in loop.parameters),
            keep_state=self.incidents.keep_state,
            frames=loop.frames,
            gap=loop.gap(begun),
            changes=self.guard.state_check.changes(loop.model) if reading.state_changed else (),
            update=self._update_fault if reading.bad_update else None,
            recheck=self.guard.recheck.found,
        )

    def _update_fault(self) -> UpdateFault | None:
        """Runs the optimizer's step again and names what is not finite in it; everything is put back."""
        loop, begun = self.loop, self.begun
        with loop.update():
            each = (
                update_fault(loop.model, optimizer, partial(loop.run_optimizer_step, optimizer, begun))
                for optimizer in optimizers_of(loop.optimizer)
            )
            return next(filter(None, each), None)

    def can_be_repeated(self) -> bool:
        """See `ReadStep`."""
        return self.loop.can_take_again(self.begun, self.reading)

    def differs_when_repeated(self, cause: str | None) -> bool:
        """Two reruns of an investigation agree, and differ from the step. A closure may depend on anything else."""
        return cause == "hardware_fault"

    def update_again(self) -> None:
        """See `ReadStep`."""
        with self.loop.update():
            self.loop.run_optimizer_step(self.loop.optimizer, self.begun)

    def gradient_again(self, compared: Compared) -> Tensor | None:
        """See `ReadStep`."""
        return sums(self.loop.rerun(self.begun, 1.0).run().gradients, self.device)

    def sample_counts(self) -> Counts:
        """See `ReadStep`. A micro-batch without rows counts as one sample."""
        begun = self.begun
        again = not begun.batches_changed and all(each.takes_batch for each in begun.micro_batches)
        sizes = [max(sample_count(each.batch), 1) for each in begun.micro_batches] if again else []
        self._counts = self.parallel.gather(sizes)
        return self._counts if all(self._counts) else []

    def is_sound_without(self, left_out: Collection[Sample]) -> bool:
        """See `ReadStep`. The rerun leaves no trace."""
        loop = self.loop
        try:
            found = loop.rerun(self.begun, self.reading.loss_scale).run(self.without(left_out))
        except Exception:  # the user's code may raise anything, and the other ranks wait
            found = RerunResult(math.nan, math.nan, [None] * len(loop.parameters))
        numbers = torch.tensor([found.loss, found.grad_norm], device=self.device)
        if self.parallel.ranks.distributed:
            numbers = self._over_ranks(found)
        terms, norms = LossTerms(numbers[0]), GradNorms(numbers[1], numbers[1:])
        return bool(self.guard.gate(terms, norms, StepChecks(0.0, 0.0, 0.0)))

    def _over_ranks(self, found: RerunResult) -> Tensor:
        """Returns the mean loss of the ranks, and the norm of their mean gradient, which a rerun has not averaged."""
        pairs = zip(found.gradients, self.loop.parameters, strict=True)
        flat = [torch.zeros_like(weight) if each is None else each.to_dense() for each, weight in pairs]
        loss = torch.tensor([found.loss], device=self.device)
        mean = self.parallel.all_reduce_sum(torch.cat([loss, *[each.flatten().float() for each in flat]]))
        mean /= self.parallel.ranks.world_size
        return torch.stack([mean[0], torch.linalg.vector_norm(mean[1:])])

    def without(self, left_out: Collection[Sample]) -> list[MicroBatch]:
        """Returns this rank's micro-batches without these samples."""
        return without_samples(self.begun.micro_batches, self._counts, self.parallel.ranks.rank, left_out)


COUPLED_FOR = 100
"""Number of a guard's steps for which it counts as coupled after a step of another guard."""

_GUARDS: "WeakKeyDictionary[Optimizer, ref[LoopGuard]]" = WeakKeyDictionary()
"""The guard of each optimizer. A newer guard of the same optimizer replaces it."""


class LoopGuard:
    """Judges the steps of a loop; see `Guard` for attributes and arguments.

    Attributes:
        loop_type: the kind of loop.

    Raises:
        ConfigError: model and optimizer do not belong together, or an option is out of bounds.
    """

    loop_type: type[OwnLoop] = OwnLoop
    updates = True
    _newest: ClassVar["ref[LoopGuard] | None"] = None
    """The guard of this process that took the newest step."""

    def __init__(
        self,
        model: nn.Module | Sequence[Tensor],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        folder: str | Path = "incidents",
        rollback: bool = False,
        keep: str | None = None,
        slow: str = "alarm",
        loss: str = "minimized",
        max_norm: float | None = None,
        precision: str | None = None,
        scaler: GradScaler | None = None,
        loader: Any = None,
        policy: SkipGuard | None = None,
        checksum_every: int = 0,
        recheck_every: int = 0,
        check_update: bool = True,
        max_incidents: int = 10,
        max_seconds: float = 120.0,
        keep_state: bool = True,
        forecast_every: int = 0,
        name: str = "",
    ) -> None:
        check_numbers(
            max_norm=max_norm, max_incidents=max_incidents, max_seconds=max_seconds, forecast_every=forecast_every
        )
        policy = make_policy(
            policy,
            rollback=rollback,
            keep=keep,
            slow=slow,
            loss=loss,
            checksum_every=checksum_every,
            recheck_every=recheck_every,
            check_update=check_update,
        )
        folder, parallel = Path(folder), ranks_of_loop()
        self._name = name
        self._tracker = tracker = LoopTracker(folder if max_incidents else None, parallel.ranks, name)
        self._loop = loop = self.loop_type(
            model,
            optimizer,
            policy,
            parallel,
            tracker,
            precision=precision,
            scaler=scaler,
            loader=check_loader(loader),
            max_norm=max_norm or None,
            forecast_every=forecast_every,
        )
        if policy.keeps and any(hasattr(parameter, "to_local") for parameter in loop.parameters):
            raise ConfigError(
                "Guard(keep='all_but_guilty') does not work with sharded weights (fully_shard): use DDP, or keep='none'"
            )
        self._incidents = Incidents(
            folder, max_incidents, max_seconds, ranks=parallel.ranks, tracker=tracker, keep_state=keep_state
        )
        self._shown_step, self._next_shown_step = 0, None  # number of the last step and of the next, as the loop counts
        self.alarms: list[Alarm] = []
        self.last: Reading | None = None
        self.rolled_back = 0
        self._clipping = ScaledClipping()
        self._alternated_at: int | None = None  # own step before the newest step of another guard
        for each in optimizers_of(loop.optimizer):
            if (older := guard_of(each)) is not None:
                older.detach()
            _GUARDS[each] = ref(self)
            each.register_step_pre_hook(check_caller)

    def at(self, step: SupportsIndex) -> None:
        """Sets the number of the next step as the loop counts, which messages and incidents then show.

        Without it they show how many steps the guard has judged. The numbers may repeat, skip and go back.

        Raises:
            ConfigError: the number is negative.
        """
        if (number := index(step)) < 0:
            raise ConfigError(f"step={number} is below 0: give the number of the step")
        self._next_shown_step = number

    def state_replaced(self) -> None:
        """Tells the guard that the loop itself has changed weights, moments or buffers.

        Not needed after `load_state_dict` of the model or of the optimizer. Older checksums are discarded,
        and the next step takes a new snapshot to go back to.
        """
        self._loop.state_replaced()

    def detach(self) -> None:
        """Leaves the loop alone; see `AttachedGuard`. The loop itself calls any other guard."""

    # ---- a step

    def _count(self, reading: Reading) -> None:
        """Counts the step."""
        loop = self._loop
        # Everything that is due every so many steps follows the guard's own count: the loop's may repeat or go back.
        self._shown_step = reading.step if self._next_shown_step is None else self._next_shown_step
        self._next_shown_step = None
        self._note_other_guards()
        loop.steps = reading.step

    def _note_other_guards(self) -> None:
        """Couples the guard if another one has taken steps between two of its own (`policy/high_norms.py`)."""
        steps, newest = self._loop.steps, LoopGuard._newest and LoopGuard._newest()
        if newest not in (None, self) and steps:
            self._alternated_at = steps
        LoopGuard._newest = ref(self)
        policy = self._loop.policy
        policy.high_norms.coupled = self._alternated_at is not None and steps - self._alternated_at < COUPLED_FOR
        if policy.high_norms.coupled:
            policy.slow_spikes.ignore_trends()  # this network's loss follows the other one

    def _follow(self, begun: BegunStep, reading: Reading) -> None:
        """Gets the verdict on a step whose update was applied or held, and follows it."""
        loop, policy = self._loop, self._loop.policy
        # A held step changes nothing: its buffers are restored first.
        if not reading.applied:
            loop.hold(begun, reading)
        shown = self._shown_step
        self.last, self.rolled_back = reading if reading.step == shown else reading._replace(step=shown), 0
        # The verdict, after an investigation of a held step while its batch, gradients and generators are there.
        step = LoopStep(loop, begun, reading, self._shown_step, self._tracker, self._incidents)
        verdict = settle(step)
        # The numbers were wrong once and the state is intact: take the same step again, and follow its new verdict.
        # Or a few samples were at fault: take it again without them.
        if verdict is Verdict.KEEP:
            note_taken_again(step)
            self._follow(begun, loop.take_without(begun, reading, step.without(step.left_out)))
            return
        if verdict is Verdict.RESTORE and not reading.applied and policy.kind != "state":
            note_taken_again(step)
            self._follow(begun, loop.take_again(begun, reading))
            return
        if reading.applied:
            loop.note_applied(begun, reading)
            self._show(self._clipping.add(reading))
        self._show(policy.new_alarms())
        # Only now are weights, moments and buffers final: take the checksums that the next step compares with.
        loop.remember_state()
        if verdict is Verdict.RESTORE:  # memory is damaged: nothing after the newest intact state can be trusted
            self._restore_intact_state()
        elif verdict is Verdict.ROLLBACK:  # skipping did not help: the weights are bad, not the batches
            self._roll_back()
        elif verdict is Verdict.HALT:
            self._halt(policy.reason)
        else:
            if verdict is Verdict.APPLY:  # before the snapshot, which holds the forecast's series
                self._show_predictions(loop.forecast.after_step(reading))
            loop.states.after_update(reading.step)

    def _end_step(self) -> None:
        """Ends a step, also one that raised an error."""
        if new := self._loop.trained.replaced():
            self._tracker.note(
                f"step {self._shown_step}: {', '.join(new[:3])}: replaced since the optimizer was made, which still "
                "updates the old one; fix: make optimizer and guard again, or copy_ the new values into the old "
                "parameter"
            )
        self._loop.loads.noticed = False  # the guard itself has loaded states since, in a rollback

    def _show(self, alarms: Sequence[Alarm]) -> None:
        """Reports alarms, and keeps them."""
        self.alarms += alarms
        alarms = [replace(alarm, text=self._with_own_count(alarm.text)) for alarm in alarms]
        log_alarms(self._tracker, self._shown_step, alarms)

    def _show_predictions(self, predictions: Sequence[Prediction]) -> None:
        """Reports the predictions of the forecast."""
        predictions = [replace(each, text=self._with_own_count(each.text)) for each in predictions]
        log_predictions(self._tracker, self._shown_step, predictions)

    def _with_own_count(self, text: str) -> str:
        """Returns a text that names steps as the guard counts, and says so if the loop counts otherwise."""
        own = self._loop.steps
        return text if self._shown_step == own else f"{text} (as the guard counts steps; this is its step {own})"

    # ---- roll back, restore, and end

    def _roll_back(self) -> None:
        """Restores the newest healthy state."""
        loop, step, reason = self._loop, self._shown_step, self._loop.policy.reason
        went = loop.states.roll_back(loop.steps, number=step)
        if went is None:
            self._halt(f"{reason}; no healthy state is left to go back to")
        loop.remember_state()
        self.rolled_back = went.pass_over
        fields = {"skipped": went.pass_over, "lr_factor": loop.policy.lr_multiplier(loop.steps)}
        self._report("rollback", to=went.step, loaded=went.step, reason=reason, **fields)
        text = (
            f"step {step}: {reason}: rollback {loop.policy.rollbacks}, to step {went.step}; pass over the batches of "
        )
        self._tracker.note(self._with_own_count(f"{text}{went.pass_over} steps (guard.rolled_back)"))

    def _restore_intact_state(self) -> None:
        """Restores the newest intact state, because memory or arithmetic failed since."""
        loop, step, reason = self._loop, self._shown_step, self._loop.policy.reason
        loop.policy.skips["state"] += 1  # counts as skipped: the loop cannot read this batch again
        loop.policy.state_check.put_back_buffers()  # the saved state lacks buffers that the model does not save
        went = loop.states.put_back(step)
        if went is None:
            self._halt(f"{reason}; no intact state is left to go back to")
        loop.remember_state()
        self._report("restore", to=went.step, loaded=went.step, reason=reason)
        text = f"step {step}: {reason}: the state after step {went.step} is put back; go on with any batch"
        self._tracker.note(self._with_own_count(text))

    def _halt(self, reason: str) -> NoReturn:
        """Ends the loop.

        Raises:
            TrainingHalted: always.
        """
        since = self._loop.policy.since
        self._report("halt", reason=reason, **({} if since is None else {"since": since}))
        text = f"step {self._shown_step}: {reason}"
        raise TrainingHalted(f"{self._name}: {text}" if self._name else text)

    def _report(self, kind: str, **fields: Any) -> None:
        """Records an event of the present step."""
        self._tracker.event(kind, self._shown_step, tick=self._loop.steps, **fields)

    # ---- counts, incidents and state

    @property
    def skipped(self) -> int:
        """Number of steps that were held, fp16's routine overflows included."""
        return sum(self._loop.policy.skips.values())

    @property
    def machine_faults(self) -> int:
        """Number of steps at which memory or arithmetic failed, and that were taken again or put back."""
        return self._loop.policy.machine_faults

    @property
    def kept_steps(self) -> int:
        """Number of steps that were applied without some of their samples."""
        return self._loop.policy.kept_steps

    @property
    def samples_left_out(self) -> int:
        """Number of samples that steps were applied without, over all ranks."""
        return self._loop.policy.samples_left_out

    @property
    def left_out(self) -> int:
        """Number of samples that the last step was applied without."""
        return self._loop.policy.left_out

    @property
    def skips(self) -> dict[str, int]:
        """Number of steps that were held, by kind.

        The kinds are `nonfinite`, `spike`, `overflow`, `state`, `recheck` and `update`.
        """
        return {kind: count for kind, count in self._loop.policy.skips.items() if kind != "bad_data"}

    @property
    def incidents(self) -> list[IncidentSummary]:
        """The incidents, oldest first: `path`, `cause`, `verdict`, `fix`, and `lines` to show."""
        return [*self._incidents.handler.found]

    def state_dict(self) -> dict[str, Any]:
        """Returns counts, limits and loss scale, for the loop's own checkpoint."""
        return self._loop.state_dict() | {"newest_kind": self._incidents.handler.newest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them. Snapshots are not part of the state: the next step takes a new one."""
        self._loop.load_state_dict(state)
        self._shown_step, self._incidents.handler.newest = self._loop.steps, state.get("newest_kind", "")
        self.last, self.rolled_back, self._alternated_at = None, 0, None
        if self._loop.steps:
            for each in optimizers_of(self._loop.optimizer):
                watch_for_lost_moments(each, self._loop.steps, self._note_lost_moments)

    def _note_lost_moments(self, alarm: Alarm) -> None:
        """Shows the alarm of an optimizer that was not restored."""
        self._show([alarm])


def check_caller(optimizer: Optimizer, *arguments: Any) -> None:
    """Refuses an `optimizer.step()` that the optimizer's guard did not ask for."""
    guard = guard_of(optimizer)
    if guard is not None and guard.updates and not guard._loop.updating:
        raise ConfigError(
            "optimizer.step() was called outside the guard: guard.step() and guard.update() apply the update; remove "
            "the call, or use Guard.attach(model, optimizer) for a loop that cannot be changed"
        )


def guard_of(optimizer: Optimizer) -> LoopGuard | None:
    """Returns the newest guard of an optimizer; None if it has none."""
    newest = _GUARDS.get(optimizer)
    return None if newest is None else newest()
