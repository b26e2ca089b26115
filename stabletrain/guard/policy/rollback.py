"""Rollback: if skipping does not help, the weights themselves are bad, and the guard restores an older state.

    skips do not end (`patience`)    ->  restores the newest healthy state, skips the data read since that state plus
                                         `skip_batches`, and lowers the learning rate for `lr_steps` steps
    the rollback does not help       ->  rolls back further, with an even lower learning rate
    `max_rollbacks` without progress ->  halts the run

A skipped step changes nothing. Reading the same batches again from the older state would therefore lead to the same
weights, bit for bit. This is why a rollback skips all data read since that state, as PaLM did (arXiv 2204.02311,
section 5.1: restart about 100 steps before the spike, skip 200 to 500 batches, including those seen before the spike).

The guard knows states only by their step numbers. The loop holds the states (`checkpoint/capture.py`). If a process was
killed, its snapshots are lost. The resumed run then replays steps from an older checkpoint to get the same state again,
which works because a step is a pure function.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from stabletrain.errors import ConfigError
from stabletrain.guard.policy.kept import COUNTS
from stabletrain.guard.policy.machine_faults import NEVER_UNDONE
from stabletrain.guard.policy.retained import RetainedStates
from stabletrain.guard.policy.skip import SkipGuard
from stabletrain.records import Reading, RollbackPlan, Verdict

INTEGER_OPTIONS = {
    "patience": (1, "10 skips"),
    "snapshots": (1, "3 states"),
    "snapshot_every": (1, "50 steps"),
    "healthy_after": (0, "20 steps"),
    "skip_batches": (0, "20 batches"),
    "max_rollbacks": (0, "3 rollbacks"),
    "lr_steps": (0, "100 steps"),
}
"""Lower bound and customary value of each integer option."""

LOWER_LR_FIXES = ("optimizer.lr=", "warmup.steps=", "lower the learning rate")
"""Beginnings of the fixes that lower the learning rate, as a rollback does; the last one in a user's own loop."""

PATIENCE_AT_END = 2
"""Value of `trouble` that triggers a rollback at the last step. A single skip leaves the weights as they were."""

CUMULATIVE = {
    "skips": "skips",
    "rollbacks": "rollbacks",
    "rollbacks_without_progress": "in_vain",
    "restores_without_progress": "restored_in_vain",
    "progress_after_step": "beyond",
    "lr_reduction": "lowered",
    "rolled_back_mistake": "rolled_back_for",
    "validation_rise_start": "risen_since",
    **NEVER_UNDONE,
    **COUNTS,
}
"""Attributes that a rollback does not restore, each with its key in checkpoints and in the event of a halt."""


@dataclass
class RollbackGuard(SkipGuard):
    """Skips unsafe updates, and rolls back to a healthy state if the skips do not end.

    Attributes:
        patience: value of `trouble` that triggers a rollback.
        snapshots: number of healthy states held in memory.
        snapshot_every: steps between two snapshots.
        healthy_after: steps after which a snapshot becomes healthy, if `trouble` is 0 then.
        skip_batches: batches to skip in addition to those read since the restored state.
        max_rollbacks: number of rollbacks without progress after which the next trouble halts the run. Progress is a
            healthy state taken after the step that caused the last rollback.
        lr_factor: multiplies the learning rate after a rollback, and again after each further rollback without
            progress.
        lr_steps: number of steps for which the learning rate stays lowered.
        states: the states a rollback may restore.
        rollbacks: rollbacks in the whole run.
        rollbacks_without_progress: rollbacks since the last progress.
        restores_without_progress: steps taken again after a fault of the machine since the last progress; at most
            `max_rollbacks`.
        progress_after_step: a healthy state from after this step is progress.
        rolled_back_mistake: identifies the mistake that caused the last rollback without progress; 0 if unknown.
        validation_rise_start: the rise of the validation loss that caused the last such rollback began at this
            step; 0 for none.
        lr_reduction: start step, stop step (exclusive) and factor of the lowered learning rate.
        rollback_before: the next rollback must restore a state from before this step; None: the newest healthy state.
    """

    patience: int = 10
    snapshots: int = 3
    snapshot_every: int = 50
    healthy_after: int = 20
    skip_batches: int = 20
    max_rollbacks: int = 3
    lr_factor: float = 0.5
    lr_steps: int = 100
    rollbacks: int = 0
    rollbacks_without_progress: int = 0
    restores_without_progress: int = 0
    progress_after_step: int = 0
    lr_reduction: tuple[int, int, float] = (0, 0, 1.0)
    rolled_back_mistake: int = 0
    validation_rise_start: int = 0
    states: RetainedStates = field(init=False, repr=False)
    rollback_before: int | None = field(init=False, repr=False, default=None)

    slow_modes: ClassVar[tuple[str, ...]] = ("off", "alarm", "rollback")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (lowest, customary) in INTEGER_OPTIONS.items():
            if (value := getattr(self, name)) < lowest:
                raise ConfigError(f"guard.{name}={value} is below {lowest}: {customary} is customary")
        if not 0 < self.lr_factor <= 1:
            raise ConfigError(
                f"guard.lr_factor={self.lr_factor} is outside (0, 1]: 0.5 is customary; 1 keeps the learning rate"
            )
        if self.patience >= self.max_consecutive:
            raise ConfigError(
                f"guard.patience={self.patience} is not below guard.max_consecutive={self.max_consecutive}: the run "
                "would halt before its first rollback; lower guard.patience"
            )
        self.states = RetainedStates(self.snapshots, self.snapshot_every, self.healthy_after)

    def judge(self, reading: Reading) -> Verdict:
        """Returns the verdict on a step and updates counts, limits and retained states."""
        verdict = super().judge(reading)
        if verdict is Verdict.APPLY and (back := self._judge_slow_spikes()) is not Verdict.APPLY:
            return back
        # The step was applied, and the run is out of trouble: states that are old enough become healthy. While a slow
        # spike is suspected, none does: newer states would replace those from before the spike.
        if verdict is Verdict.APPLY and self.healthy and not self.slow_spikes.suspects:
            promoted = self.states.promote(reading.step)
            if self.states.pinned is not None and any(step >= self.states.pinned + self.window for step in promoted):
                self.states.pinned = None  # the run is healthy with its other settings
            # If the run got past the trouble, restore the budget.
            if any(step > self.progress_after_step for step in promoted):
                self.rollbacks_without_progress, self.restores_without_progress, self.rolled_back_mistake = 0, 0, 0
        # Bad data and fp16's overflows do not mean that the weights are bad: no rollback for them.
        if verdict is not Verdict.SKIP or self.kind not in ("spike", "nonfinite"):
            return verdict
        if self.trouble < self.patience:
            return Verdict.SKIP
        # After so many skips the weights are at fault, not the data.
        return self._roll_back_or_halt(f"skipping has not ended it ({self.option('patience')})")

    def judge_validation(self, step: int, loss: float) -> Verdict:
        """Returns the verdict on a state by its validation loss: ROLLBACK with `slow=rollback` if it has risen."""
        super().judge_validation(step, loss)
        return self._judge_slow_spikes()

    def _judge_slow_spikes(self) -> Verdict:
        """Returns ROLLBACK if the guard rolls back for a slow spike that was found; sets `rollback_before`.

        Returns APPLY if `max_rollbacks` rollbacks did not help: the alarm was raised, the loss is finite, and the run
        goes on. The same holds if the validation loss has not fallen to its best since the last rollback for its rise:
        an overfitting model would be rolled back again and again. With `escalate=whatif` the run then halts, so that
        other fixes are tried.
        """
        if self.slow != "rollback" or not self._alarms:
            return Verdict.APPLY
        found = self._alarms[-1]
        since = found.since or 0
        exhausted = ""
        if self.rollbacks_without_progress >= self.max_rollbacks:
            exhausted = f", and {self.option('max_rollbacks')} rollbacks did not help"
        elif found.kind == "slow_validation" and since == self.validation_rise_start:
            exhausted = ", and a rollback did not help"
        if exhausted and self.escalate != "whatif":
            return Verdict.APPLY
        self.kind, self.reason = "slow", found.text.partition(". fix: ")[0] + exhausted
        if exhausted:
            self.since = since
            return Verdict.HALT
        if found.kind == "slow_validation":
            self.validation_rise_start = since
        # The start of a change is an estimate: a state is safe if it would have become healthy before it.
        self.rollback_before = max(since - 1 - self.healthy_after, 0)
        return Verdict.ROLLBACK

    def at_end(self, verdict: Verdict) -> Verdict:
        """Returns the verdict on the last step: ROLLBACK or HALT if `trouble` is at least `PATIENCE_AT_END`."""
        # No steps are left in which the trouble could end, so the guard does not wait for `patience`.
        if verdict is not Verdict.SKIP or self.trouble < PATIENCE_AT_END:
            return verdict
        return self._roll_back_or_halt("the run is at its end")

    def _roll_back_or_halt(self, why: str) -> Verdict:
        what, incident = f"{self.reason}, and {why}", self._incident
        # The same mistake after a rollback, with other data: more rollbacks would only lower the learning rate further,
        # which helps only if the diagnosis names the learning rate. A what-if, however, must know how much data is bad.
        same = (
            incident is not None
            and self.escalate != "whatif"
            and self.rollbacks_without_progress
            and mistake_number(incident) == self.rolled_back_mistake
        )
        if same and not any(each.startswith(LOWER_LR_FIXES) for each in incident.fix):
            fix = incident.fix[0] if incident.fix else "none known"
            self.reason = f"{what}: {incident.cause} again after a rollback, with other data. fix: {fix}"
            return Verdict.HALT
        if self.rollbacks_without_progress < self.max_rollbacks:
            self.reason = what
            return Verdict.ROLLBACK
        # The budget is used up: each rollback went further back, with a lower learning rate, and none helped.
        budget = f"{self.option('max_rollbacks')} rollbacks did not help"
        self.reason = f"{what}, and {budget}: {self.gentler_updates}"
        return Verdict.HALT

    def _count_machine_fault(self, step: int) -> None:
        """Counts a fault of the machine at this step; `max_rollbacks` of them are allowed without progress."""
        super()._count_machine_fault(step)
        self.restores_without_progress += 1
        self.progress_after_step = max(self.progress_after_step, step)

    def _why_no_retry(self, damaged: bool) -> str:
        """Returns why the step cannot be taken again; empty if it can."""
        if self.restores_without_progress < self.max_rollbacks or not (damaged or self.max_rollbacks):
            return ""
        limit = self.option("max_rollbacks")
        if not self.max_rollbacks:
            return f"; {limit} restores no state"
        return f", {limit} times without progress: resume on another machine, and test this one"

    def reset_for_new_settings(self, loss: float | None) -> None:
        """Adapts to other settings: also restores the budget of rollbacks. Older states can still be restored."""
        super().reset_for_new_settings(loss)
        self.rollbacks_without_progress, self.restores_without_progress, self.lr_reduction = 0, 0, (0, 0, 1.0)

    def begin_rollback(self, step: int, target: int) -> RollbackPlan:
        """Counts a rollback from `step` to `target`, and lowers the learning rate.

        Args:
            step: step that caused the rollback.
            target: step of the restored state.
        """
        self.rollbacks += 1
        self.rollbacks_without_progress += 1
        self.rolled_back_mistake = 0 if self._incident is None else mistake_number(self._incident)
        self._incident = None
        self.progress_after_step = max(self.progress_after_step, step)
        self.rollback_before = None
        self.retried_step = self.restored_step = 0  # the step of that number reads other data now
        self.lr_reduction = (target, target + self.lr_steps, self.lr_factor**self.rollbacks_without_progress)
        return RollbackPlan(self.rollbacks, self.skip_batches, self.lr_reduction[2], self.lr_reduction[1])

    def lr_multiplier(self, step: int) -> float:
        """Factor of the learning rate at step number `step`: below 1 for `lr_steps` steps after a rollback."""
        start, stop, factor = self.lr_reduction
        return factor if start <= step < stop else 1.0

    def cumulative_state(self) -> dict[str, Any]:
        """Counts and budgets that a rollback does not restore, by their keys in checkpoints."""
        own = {key: getattr(self, name) for name, key in CUMULATIVE.items()}
        return own | {"skips": dict(self.skips), "lowered": list(self.lr_reduction)}

    def load_cumulative_state(self, state: dict[str, Any]) -> None:
        """Overwrites the restored counts and budgets with those from before the rollback."""
        for name, key in CUMULATIVE.items():
            if key in state:
                # A copy of the counts, because the saved state must not change with them.
                value = state[key]
                copied = dict(value) if key == "skips" else tuple(value) if key == "lowered" else value
                setattr(self, name, copied)

    def state_dict(self) -> dict:
        """Counts, windows, budgets and steps of the retained states, for the checkpoint."""
        return {**super().state_dict(), **self.cumulative_state(), **self.states.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restores all values; what the checkpoint of another kind of guard lacks is reset."""
        super().load_state_dict(state)
        self.rollback_before = None
        self.states.load_state_dict(state)
        if "slow" in state:  # its name in checkpoints of version 1
            state = {"lowered": state["slow"], **state}
        # `NoGuard` has restored the skips.
        defaults = {key: 0 for key in CUMULATIVE.values() if key != "skips"} | {"lowered": (0, 0, 1.0)}
        self.load_cumulative_state({key: state.get(key, default) for key, default in defaults.items()})


def mistake_number(incident: Any) -> int:
    """Returns a number that identifies an incident's mistake: checkpoints hold numbers only."""
    return zlib.crc32("\n".join(incident.mistake).encode())
