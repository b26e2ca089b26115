"""Faults of the machine: memory or arithmetic failed, so the step is taken again.

| what is wrong | what the loop does | guards |
|---|---|---|
| only the step's numbers, which changed nothing | takes the step again | all that skip |
| the state | restores an intact state, and takes the step again | `RollbackGuard`; `SkipGuard` halts |

A step is taken again only once. If it fails again, from a verified state, then code or data are at fault. A step that
is taken again is not counted as skipped.
"""

from dataclasses import dataclass, field
from typing import Any

from stabletrain.guard.policy.off import NoGuard
from stabletrain.records import Verdict

CHANGED_BY_SKIP = ("consecutive", "trouble", "bad_updates")
"""Counts that a skipped step changes, besides `skips`; one that is taken again does not."""

NEVER_UNDONE = {"machine_faults": "machine_faults", "retried_step": "taken_again", "restored_step": "restored"}
"""Counts of the whole run that no rollback undoes, each with its key in checkpoints."""

SAVED = {**{name: name for name in CHANGED_BY_SKIP}, **NEVER_UNDONE}
"""All counts, each with its key in checkpoints."""


@dataclass
class RetryingGuard(NoGuard):
    """Takes a step again if memory or arithmetic failed: the base of the guards that skip steps.

    Attributes:
        consecutive: consecutive skipped steps up to now.
        trouble: steps skipped as spike or non-finite, minus the steps applied after them, at least 0. The state is
            healthy at 0.
        bad_updates: updates in a row that were not finite.
        machine_faults: number of steps that were taken again.
        retried_step: the last step that was taken again because its numbers were wrong.
        restored_step: the last step at which a damaged state was replaced by an intact one.
        in_own_loop: whether the loop is a user's own: its messages name no keys of `train.py`.
        faulty_rank: the rank on which the update of `retried_step` was bad; -1 if unknown.
    """

    trouble: int = 0
    bad_updates: int = 0
    restored_step: int = 0
    in_own_loop: bool = field(init=False, repr=False, default=False)
    faulty_rank: int = field(init=False, repr=False, default=-1)
    _retry_to_judge: int = field(init=False, repr=False, default=0)
    _before_skip: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """Counts from before the newest skip, restored if that step is taken again."""

    def option(self, name: str) -> str:
        """Returns an option and its value as the user names it: `guard.patience=10` in a run of `train.py`."""
        return f"{'' if self.in_own_loop else 'guard.'}{name}={getattr(self, name)}"

    @property
    def gentler_updates(self) -> str:
        """What to change if every batch fails on these weights."""
        if self.in_own_loop:
            return "lower the learning rate, lengthen the warmup, or try fp32"
        return "lower optimizer.lr, lengthen warmup.steps, or try precision=fp32"

    def note_retry(self, step: int, rank: int = -1) -> None:
        """Notes that a step is taken again. If its update is applied then, the machine was at fault, on that rank."""
        self.retried_step, self._retry_to_judge, self.faulty_rank = step, step, rank

    def _begin_skip(self) -> None:
        """Saves the counts before a skipped step is counted: it may turn out to be a fault of the machine."""
        self._before_skip = {name: getattr(self, name) for name in CHANGED_BY_SKIP} | {"skips": dict(self.skips)}

    def _end_retry(self, step: int) -> None:
        """Ends an applied step. If its first try gave a bad update, counts a fault of the machine."""
        self._before_skip = {}
        if step == self._retry_to_judge:
            self._retry_to_judge = 0
            self._count_machine_fault(step)

    def on_machine_fault(self, step: int, why: str, *, damaged: bool, otherwise: Verdict | None = None) -> Verdict:
        """Returns the verdict on a step at which memory or arithmetic failed: RESTORE, but only once for each step.

        Args:
            step: the step.
            why: what happened, for `reason`.
            damaged: whether the state is wrong. If not, only this step's numbers were wrong, and they changed nothing.
            otherwise: the verdict if it is no fault of the machine; None halts.
        """
        self.reason = why
        # A second time at the same step: the code or the data are at fault, and a third try would not help.
        if step == (self.restored_step if damaged else self.retried_step):
            if otherwise is not None:
                return otherwise
            self.reason = f"{why}: again, after that state was put back and verified, so the memory is not at fault"
            key = "" if self.in_own_loop else "guard."
            self.reason += f"; fix: {key}checksum_every=0 if your own code changes them on purpose"
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
        self._restore_counts()
        return Verdict.RESTORE

    def _restore_counts(self) -> None:
        """Restores the counts from before the newest skip: that step is taken again, so it is not skipped."""
        for name, value in self._before_skip.items():
            setattr(self, name, value)

    def _count_machine_fault(self, step: int) -> None:
        """Counts a fault of the machine at this step."""
        self.machine_faults += 1

    def _why_no_retry(self, damaged: bool) -> str:
        """Returns why the step cannot be taken again; empty if it can."""
        if not damaged:  # the weights are as they were, so no older state is needed
            return ""
        if self.in_own_loop:
            return ": load the last good checkpoint; Guard(rollback=True) goes back to an intact state by itself"
        return ": resume=auto continues from the last checkpoint; guard=rollback rolls back automatically"

    def state_dict(self) -> dict:
        """Counts, for the checkpoint."""
        return super().state_dict() | {key: getattr(self, name) for name, key in SAVED.items()}

    def load_state_dict(self, state: dict) -> None:
        """Restores them; what the checkpoint of another kind of guard lacks is reset."""
        super().load_state_dict(state)
        for name, key in SAVED.items():
            setattr(self, name, state.get(key, 0))
        self._before_skip, self._retry_to_judge = {}, 0
