"""Guards that retain no states: `NoGuard` and `SkipGuard`.

`NoGuard` applies every update, as a plain PyTorch loop does; only fp16's loss scaling skips some. `SkipGuard` skips
unsafe updates and continues with the next batch.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.guard.checks.recheck import NoRecheck, recheck_every
from stabletrain.guard.checks.state_check import UNKNOWN, NoStateCheck, StateCheck
from stabletrain.guard.checks.update_check import NoUpdateCheck, UpdateCheck
from stabletrain.guard.policy.divergence import Divergence, NoDivergence
from stabletrain.guard.policy.limits import Limits
from stabletrain.guard.policy.retained import NoRetainedStates
from stabletrain.guard.policy.slow import NoSlowSpikes, slow_spikes
from stabletrain.monitors.rolling import Alarm
from stabletrain.monitors.update_length import NoLengths
from stabletrain.records import LARGEST, GradNorms, LossTerms, Reading, RollbackPlan, StepChecks, Verdict


def overflow_reason(reading: Reading) -> str:
    """Describes in one line an update that fp16's loss scaling skipped."""
    return f"fp16 overflow at loss scale {reading.loss_scale:g}: the scale is lowered"


@dataclass
class NoGuard:
    """Applies every update.

    Attributes:
        skips: number of skipped steps by kind; here only `overflow`, by fp16's loss scaling.
        reason: why the newest skipped step was skipped, in one line.
        kind: kind of the newest skipped step, or `slow` after a slow spike that is rolled back, or `diverged`.
        since: first step of the problem that caused the halt; None if that is the first of the skips before the halt.
        rollbacks: always 0.
        machine_faults, retried_step: always 0.
        faulty_rank: always -1.
        consecutive: always 0.
        escalate: what happens after a halt: always `halt`, the run ends.
        states, state_check, update_check, recheck: the parts that a guard is composed of; here all do nothing.
    """

    skips: dict[str, int] = field(default_factory=lambda: {"overflow": 0})
    reason: str = ""
    kind: str = ""
    since: int | None = None
    rollbacks: int = 0
    machine_faults: int = 0
    retried_step: int = 0
    faulty_rank: int = -1
    consecutive: int = 0
    escalate: str = "halt"
    states = NoRetainedStates()
    state_check: NoStateCheck = field(init=False, repr=False, compare=False, default_factory=NoStateCheck)
    update_check: NoUpdateCheck = field(init=False, repr=False, compare=False, default_factory=NoUpdateCheck)
    recheck: NoRecheck = field(init=False, repr=False, compare=False, default_factory=NoRecheck)

    lengths = NoLengths()
    """Measures each update: nothing, because this guard looks for no slow spikes."""

    rollback_before = None
    """The next rollback must restore a state from before this step; None: the newest healthy state."""

    bounds = (math.inf, math.inf)
    """Largest loss and gradient norm that open the gate."""

    note = ""
    """Text after the guard's name in the first lines of the run."""

    healthy = True
    """Whether the state is healthy: this guard does not judge it."""

    def gate(self, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Bool[Tensor, ""]:
        """Returns True, 0-d on the device of the norms: the gate is always open."""
        del terms, checks
        return torch.ones_like(norms.total, dtype=torch.bool)

    def judge(self, reading: Reading) -> Verdict:
        """Returns APPLY, or SKIP if fp16's loss scaling skipped the update."""
        if reading.applied:
            return Verdict.APPLY
        self.skips["overflow"] += 1
        self.kind, self.reason = "overflow", overflow_reason(reading)
        return Verdict.SKIP

    def judge_validation(self, step: int, loss: float) -> Verdict:
        """Returns APPLY: this guard does not judge validation losses."""
        del step, loss
        return Verdict.APPLY

    def new_alarms(self) -> list[Alarm]:
        """Returns the slow spikes found since the last call: none."""
        return []

    def at_end(self, verdict: Verdict) -> Verdict:
        """Returns the verdict on the last step unchanged."""
        return verdict

    def on_machine_fault(self, step: int, why: str, *, damaged: bool, otherwise: Verdict | None = None) -> Verdict:
        """Returns APPLY: this guard goes on with a state that memory or arithmetic has damaged."""
        del step, damaged
        self.reason = why
        return otherwise or Verdict.APPLY

    def note_mistake(self, incident: Any) -> None:
        """Does nothing: this guard never rolls back."""
        del incident

    def trouble_at_end(self) -> str | None:
        """Returns None: this guard reports no trouble at the end of the run."""
        return None

    def lr_multiplier(self, step: int) -> float:
        """Returns 1: this guard does not lower the learning rate."""
        del step
        return 1.0

    def reset_for_new_settings(self, loss: float | None) -> None:
        """Does nothing: this guard has no statistics that depend on the settings."""
        del loss

    def note_retry(self, step: int, rank: int = -1) -> None:
        """Does nothing."""
        del step, rank

    def begin_rollback(self, step: int, target: int) -> RollbackPlan:
        """Raises NotImplementedError, because this guard never returns ROLLBACK."""
        raise NotImplementedError(f"{type(self).__name__} never rolls back, but was asked to, from {step} to {target}")

    def state_dict(self) -> dict:
        """Counts, and what is known of the newest skip, for the checkpoint."""
        # 0 for no step, because a checkpoint's values must have the same types as the live state's.
        return {"skips": dict(self.skips), "kind": self.kind, "reason": self.reason, "since": self.since or 0}

    def load_state_dict(self, state: dict) -> None:
        """Restores them; older versions saved only the counts."""
        self.skips = dict.fromkeys(self.skips, 0) | state["skips"]
        self.kind, self.reason = state.get("kind", ""), state.get("reason", "")
        self.since = state.get("since") or None


ESCALATIONS = ("halt", "whatif")

KINDS = ("bad_data", "nonfinite", "spike", "overflow", "state", "recheck", "update")

CHANGED_BY_SKIP = ("consecutive", "trouble", "bad_updates")
"""Counts that a skipped step changes, besides `skips`."""

NEVER_UNDONE = {"machine_faults": "machine_faults", "retried_step": "taken_again", "restored_step": "restored"}
"""Counts of the whole run that no rollback undoes, each with its key in checkpoints."""

MOST_BAD_UPDATES = 3
"""The run halts after this many updates in a row that were not finite: another batch does not repair an optimizer."""

CHANGED = "weights, moments or buffers are not what the last update left"
GRADIENT_DIFFERS = "the gradient came out differently when it was computed a second time"
BAD_UPDATE = "the optimizer's step gave values that are not finite, from a finite gradient"
UPDATE_DIFFERS = "the optimizer's update came out differently when it was computed a second time"


@dataclass
class SkipGuard(NoGuard):
    """Skips steps with bad data, non-finite values or spikes, and halts if the skips do not end.

    Attributes:
        sigma: standard deviations above the recent mean at which a spike begins (`limits.py`).
        window: number of applied steps from which mean and standard deviation are computed.
        max_consecutive: number of consecutive skipped steps that halts the run; fp16's overflows do not count.
        checksum_every: updates between two comparisons of the state with what the last update left (`state_check.py`);
            0 for none, None for as often as costs little.
        recheck_every: steps between two repetitions of a gradient and an update (`recheck.py`); 0 for none.
        check_update: whether updates of an optimizer that is not proven to be safe are checked (`update_check.py`).
        slow: what happens after a slow spike (`slow.py`): `off`, `alarm`, or with a `RollbackGuard` `rollback`.
        slow_rate: false alarms of slow spikes in 100,000 clean steps for which their threshold is chosen.
        escalate: what happens after a halt: `halt`, or `whatif`, which tries fixes and goes on (`whatif/healing.py`).
            With `whatif`, the run also halts if it has diverged (`divergence.py`).
        whatif_steps: number of steps that the fixes may train, together and in the whole run.
        skips: number of skipped steps by kind.
        consecutive: consecutive skipped steps up to now.
        trouble: steps skipped as spike or non-finite, minus the steps applied after them, at least 0. The state is
            healthy at 0.
        bad_updates: updates in a row that were not finite.
        machine_faults: number of steps repeated because memory or arithmetic had failed.
        retried_step: the last step that was repeated because its numbers were wrong.
        faulty_rank: the rank on which its update was bad; -1 if unknown.
        restored_step: the last step at which a damaged state was replaced by an intact one.
        state_check: compares the state with what the last update left.
    """

    sigma: float = 6.0
    window: int = 128
    max_consecutive: int = 100
    checksum_every: int | None = None
    recheck_every: int = 250
    check_update: bool = True
    slow: str = "alarm"
    slow_rate: float = 0.1
    escalate: str = "halt"
    whatif_steps: int = 4000
    skips: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    consecutive: int = 0
    trouble: int = 0
    bad_updates: int = 0
    restored_step: int = 0
    limits: Limits = field(init=False, repr=False)
    slow_spikes: NoSlowSpikes = field(init=False, repr=False)
    divergence: NoDivergence = field(init=False, repr=False)
    _alarms: list[Alarm] = field(init=False, repr=False, default_factory=list)
    _before_skip: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    faulty_rank: int = field(init=False, repr=False, default=-1)
    _retry_to_judge: int = field(init=False, repr=False, default=0)
    _incident: Any = field(init=False, repr=False, default=None)

    slow_modes: ClassVar[tuple[str, ...]] = ("off", "alarm")

    def __post_init__(self) -> None:
        if self.max_consecutive < 1:
            raise ConfigError(
                f"guard.max_consecutive={self.max_consecutive} is below 1: a run could not survive a single skip; "
                "use guard=off to apply every update"
            )
        self.limits = Limits(self.sigma, self.window)
        every = self.checksum_every
        if every is not None and every < 0:
            raise ConfigError(f"guard.checksum_every={every} is below 0: 1 checks before every update, 0 never")
        self.check_state_every(UNKNOWN if every is None else every)
        if self.escalate not in ESCALATIONS:
            raise ConfigError(f"guard.escalate={self.escalate} is not one of {', '.join(ESCALATIONS)}")
        if self.whatif_steps < 1:
            raise ConfigError(
                f"guard.whatif_steps={self.whatif_steps} is below 1: no fix could be tried; use guard.escalate=halt"
            )
        if not isinstance(self.check_update, bool):
            raise ConfigError(f"guard.check_update={self.check_update} is neither true nor false")
        self.recheck = recheck_every(self.recheck_every)
        self.update_check = UpdateCheck() if self.check_update else NoUpdateCheck()
        self._reset_detectors()

    def _reset_detectors(self) -> None:
        """Starts the detectors of slow spikes and of divergence from an empty history."""
        self.slow_spikes = slow_spikes(self.slow, self.slow_rate, self.slow_modes)
        self.divergence = Divergence(self.window) if self.escalate == "whatif" else NoDivergence()

    def check_state_every(self, updates: int) -> None:
        """Sets how often the state is compared with what the last update left; 0 for never."""
        self.state_check = StateCheck(updates) if updates else NoStateCheck()

    @property
    def lengths(self) -> NoLengths:
        """Measures each update, for the search for slow spikes."""
        return self.slow_spikes.lengths

    def gate(self, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Bool[Tensor, ""]:
        """Returns whether every measurement is within its limit, and therefore finite; 0-d, on the device."""
        limits = self.limits
        measured = (
            (terms.total.abs(), limits.loss.size),
            (terms.total, limits.loss.value),
            (norms.total, limits.norm.value),
            (checks.inputs, limits.inputs.value),
            (checks.buffers, LARGEST),
            (checks.bad_data, 0.0),
            (checks.state_changed, 0.0),
            (checks.recheck, self.recheck.limit("gradient")),
        )
        values, bounds = zip(*(each for each in measured if isinstance(each[0], Tensor)), strict=True)
        # One kernel for all differences. The sign of a difference is exact, and NaN <= 0 is False: NaN closes the gate.
        return (torch.stack(torch._foreach_sub(values, bounds)) <= 0).all()

    def judge(self, reading: Reading) -> Verdict:
        """Returns the verdict on a step and updates counts and limits."""
        return self._judge_applied(reading) if reading.applied else self._judge_skipped(reading)

    def _judge_applied(self, reading: Reading) -> Verdict:
        self._before_skip = {}
        # The first try of this step gave a bad update, and its repetition did not: the machine was at fault.
        if reading.step == self._retry_to_judge:
            self._retry_to_judge = 0
            self._count_machine_fault(reading.step)
        # One applied step ends a row of skips. `trouble` falls by one only, so that a run in which every other step is
        # skipped does not count as healthy.
        self.consecutive = self.bad_updates = 0
        self.trouble = max(self.trouble - 1, 0)
        # Only applied steps enter the statistics: a spike must not raise the limit that has just stopped it.
        self.limits.add(reading)
        self.recheck.learn(reading)
        if self.recheck.differing_part(reading):  # the update was applied; the caller finds out whether it is a fault
            self.kind, self.reason = "recheck", UPDATE_DIFFERS
            return Verdict.APPLY
        # Last, look for faults that show only over many steps.
        self._alarms += self.slow_spikes.add(reading)
        found = self.divergence.add(reading.step, reading.loss)
        if found is None:
            return Verdict.APPLY
        self.kind, self.reason, self.since = "diverged", found.text, found.since
        return Verdict.HALT

    def _judge_skipped(self, reading: Reading) -> Verdict:
        # If the skip turns out to be a fault of the machine, `on_machine_fault` restores these counts.
        self._before_skip = {name: getattr(self, name) for name in CHANGED_BY_SKIP} | {"skips": dict(self.skips)}
        self.kind, self.reason = self.kind_and_reason(reading)
        self.skips[self.kind] += 1
        if self.kind == "state":  # the weights are damaged: no later step can be right
            return self.on_machine_fault(reading.step, self.reason, damaged=True)
        if self.kind == "overflow":  # routine calibration: neither trouble nor a consecutive skip
            return Verdict.SKIP
        self.consecutive += 1
        if self.kind == "update":  # neither the weights nor the data are at fault
            return self._judge_bad_update()
        if self.kind not in ("bad_data", "recheck"):  # these say nothing about the weights
            self.trouble += 1
        return self._skip_or_halt()

    def _judge_bad_update(self) -> Verdict:
        """Returns the verdict on an update that was not finite, and was undone."""
        self.bad_updates += 1
        if self.bad_updates < MOST_BAD_UPDATES:
            return self._skip_or_halt()
        self.reason = f"{self.reason}, in {self.bad_updates} steps in a row: other batches do not help"
        if self._incident is not None:
            self.reason += f"; {self._incident.verdict}. fix: {next(iter(self._incident.fix), 'none known')}"
        return Verdict.HALT

    def _skip_or_halt(self) -> Verdict:
        """Returns SKIP, or HALT at the last of `max_consecutive` skips in a row."""
        if self.consecutive < self.max_consecutive:
            return Verdict.SKIP
        fix = "every batch fails on these weights; lower optimizer.lr, lengthen warmup.steps, or try precision=fp32"
        if self.kind == "bad_data":
            fix = "look at the data; events.jsonl names each sample"
        row = f"guard.max_consecutive={self.max_consecutive} steps in a row were skipped"
        self.reason = f"{self.reason}, and {row}: {fix}"
        return Verdict.HALT

    def judge_validation(self, step: int, loss: float) -> Verdict:
        """Returns APPLY; raises an alarm if validation losses have risen.

        Args:
            step: number of steps of the evaluated state.
            loss: nats per target, or whatever the objective measures.
        """
        self._alarms += self.slow_spikes.add_validation(step, loss)
        return Verdict.APPLY

    def new_alarms(self) -> list[Alarm]:
        """Returns the slow spikes found since the last call."""
        found, self._alarms = self._alarms, []
        return found

    def reset_for_new_settings(self, loss: float | None) -> None:
        """Adapts to the other settings with which the run is resumed: skips from before no longer count.

        Args:
            loss: of the first batch under the other settings; None if unknown. If it is above the limit, all limits are
                reset: they would stop a run in which only the definition of the loss has changed.
        """
        self.consecutive = self.trouble = 0
        self._reset_detectors()
        if loss is not None and loss > self.limits.loss.value:
            self.limits = Limits(self.sigma, self.window)

    def note_retry(self, step: int, rank: int = -1) -> None:
        """Notes that a step is repeated. If its update is applied then, the machine was at fault, on that rank."""
        self.retried_step, self._retry_to_judge, self.faulty_rank = step, step, rank

    def note_mistake(self, incident: Any) -> None:
        """Remembers the incident of the present trouble; see `forensics/handler.py`."""
        self._incident = incident

    def on_machine_fault(self, step: int, why: str, *, damaged: bool, otherwise: Verdict | None = None) -> Verdict:
        """Returns the verdict on a step at which memory or arithmetic failed: RESTORE, but only once for each step.

        A fault that happens again in the same step, from a verified state, is no fault of the machine. A step that is
        repeated is not counted as skipped.

        Args:
            step: the step.
            why: what happened, for `reason`.
            damaged: whether the state is wrong. If not, only this step's numbers were wrong, and they changed nothing.
            otherwise: the verdict if it is no fault of the machine; None halts.
        """
        self.reason = why
        # A second time at the same step: the code or the data are at fault, and another repetition would not help.
        if step == (self.restored_step if damaged else self.retried_step):
            if otherwise is not None:
                return otherwise
            self.reason = f"{why}: again, after that state was put back and verified, so the memory is not at fault"
            self.reason += "; fix: guard.checksum_every=0 if your own code changes them on purpose"
            return Verdict.HALT
        # No state to go back to, or the budget is used up.
        if refused := self._why_no_retry(damaged):
            if not damaged and otherwise is not None:  # the step can be skipped
                return otherwise
            self.reason = f"{why}{refused}"
            return Verdict.HALT
        if damaged:
            self.restored_step = step
        else:
            self.retried_step = step
        self._count_machine_fault(step)
        for name, value in self._before_skip.items():  # the step is not skipped
            setattr(self, name, value)
        return Verdict.RESTORE

    def _count_machine_fault(self, step: int) -> None:
        """Counts a fault of the machine at this step."""
        del step
        self.machine_faults += 1

    def _why_no_retry(self, damaged: bool) -> str:
        """Returns why the step cannot be repeated; empty if it can."""
        if not damaged:  # the weights are as they were, so no older state is needed
            return ""
        return ": resume=auto continues from the last checkpoint; guard=rollback rolls back automatically"

    @property
    def bounds(self) -> tuple[float, float]:
        """Largest loss and gradient norm that open the gate."""
        return self.limits.loss.value, self.limits.norm.value

    @property
    def note(self) -> str:
        """Text after the guard's name in the first lines of the run: when spike detection by the window begins."""
        spikes = f"its window judges spikes after {self.limits.cold_steps} updates"
        every = self.state_check.every
        state = {0: "no checksums", 1: "checksums every update"}.get(every, f"checksums every {every} updates")
        healed = f"; a halt starts a what-if of up to {self.whatif_steps:,} steps" if self.escalate == "whatif" else ""
        return f" ({'no spike detection' if math.isinf(self.sigma) else spikes}; {state}{healed})"

    @property
    def healthy(self) -> bool:
        """Whether the run is out of trouble: `trouble` is 0."""
        return self.trouble == 0

    def trouble_at_end(self) -> str | None:
        """Returns a warning if the run ended in trouble, or else None."""
        if self.healthy:
            return None
        skipped = self.consecutive or self.trouble
        return f"the run ended in trouble: {skipped} of its last steps were skipped ({self.reason})"

    def kind_and_reason(self, reading: Reading) -> tuple[str, str]:
        """Returns kind and reason of a skipped step: the first cause that applies, the most basic ones first."""
        if reading.state_changed:  # anything else that is wrong may follow from it
            return "state", CHANGED
        if reading.bad_data:
            return "bad_data", "the batch holds data that cannot be trained on"
        if reading.bad_update:
            return "update", BAD_UPDATE
        if reading.overflow:
            return "overflow", overflow_reason(reading)
        measured = (
            ("loss", reading.loss),
            ("gradient norm", reading.grad_norm),
            ("norm of the buffers", reading.buffers),
        )
        for what, value in measured:
            if not math.isfinite(value):
                return "nonfinite", f"{what} is {value}"
        if self.recheck.differing_part(reading) or math.isinf(reading.recheck):
            return "recheck", GRADIENT_DIFFERS
        return "spike", self.limits.exceeded(reading)

    def state_dict(self) -> dict:
        """Counts and windows, for the checkpoint."""
        counts = {name: getattr(self, name) for name in CHANGED_BY_SKIP}
        counts |= {key: getattr(self, name) for name, key in NEVER_UNDONE.items()}
        series = {
            "limits": self.limits.state_dict(),
            "recheck": self.recheck.state_dict(),
            "slow_spikes": self.slow_spikes.state_dict(),
            "divergence": self.divergence.state_dict(),
        }
        return {**super().state_dict(), **counts, **series}

    def load_state_dict(self, state: dict) -> None:
        """Restores counts and windows; what the checkpoint of another kind of guard lacks is reset."""
        super().load_state_dict(state)
        for name, key in {**dict(zip(CHANGED_BY_SKIP, CHANGED_BY_SKIP, strict=True)), **NEVER_UNDONE}.items():
            setattr(self, name, state.get(key, 0))
        self._alarms, self._before_skip, self._retry_to_judge = [], {}, 0
        if "limits" in state:
            self.limits.load_state_dict(state["limits"])
        else:
            self.limits = Limits(self.sigma, self.window)
        self.recheck.load_state_dict(state.get("recheck", {}))
        self.slow_spikes.load_state_dict(state.get("slow_spikes", {}))
        self.divergence.load_state_dict(state.get("divergence", {}))
