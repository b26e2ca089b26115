"""Snapshots of the training state in host memory: which are kept, and which one is restored.

`trainer/saved_states.py` adds checkpoints on disk, `loop_states.py` the data loader of a user's own loop. The guard
decides which steps' states to retain and which of them are healthy (`policy/retained.py`).

| | |
|---|---|
| take | copy the present state to the host, with its checksums; drop the snapshots that are no longer retained |
| choose | the newest healthy state, or after a slow spike one from before the spike began |
| check | a snapshot must be finite and have its checksums; a damaged one is reported, and dropped on all ranks |
| restore | everything but counts, budgets and time, which a rollback does not undo |
"""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Protocol, runtime_checkable

from stabletrain.checkpoint.capture import Stateful, capture, restore
from stabletrain.checkpoint.snapshots import Snapshots
from stabletrain.checkpoint.tree import Tree
from stabletrain.guard.checks.written import state_is_sound
from stabletrain.guard.policy import NoGuard
from stabletrain.records import TrainState
from stabletrain.tracking.tracker import NoTracker


@runtime_checkable
class HasCumulativeState(Protocol):
    """A part of the state with values that a rollback does not undo: counts, budgets, time."""

    def cumulative_state(self) -> dict[str, Any]: ...
    def load_cumulative_state(self, state: dict[str, Any], /) -> None: ...


class KeptStates:
    """Keeps snapshots of one run, and finds the one to restore.

    Attributes:
        state: the live state.
        parts: every stateful object other than model and optimizer, by its name in snapshots and checkpoints.
        snapshots: states in memory.

    Args:
        guard: decides which states to retain and which are healthy.
        tracker: receives events and lines.
        any_rank: returns whether its argument is true on any rank.
        only_optimizer_writes: see `Snapshots.take`.
    """

    def __init__(
        self,
        state: TrainState,
        parts: Mapping[str, Stateful],
        *,
        guard: NoGuard,
        tracker: NoTracker,
        any_rank: Callable[[bool], bool] = bool,
        only_optimizer_writes: bool = True,
    ) -> None:
        self.state, self.parts, self.snapshots = state, parts, Snapshots()
        self._references: dict[int, Any] = {}  # for each snapshot, the checksums that it must have when it is restored
        self._present = Snapshots()  # holds the present state while a snapshot is checked in its place
        self._guard, self._tracker, self._any_rank = guard, tracker, any_rank
        self._only_optimizer_writes = only_optimizer_writes

    # ---- take

    def snapshot_due(self, step: int) -> bool:
        """Returns whether to take a snapshot after `step` steps."""
        return self._guard.states.due(step)

    def take_snapshot(self) -> None:
        """Takes a snapshot of the present state, and frees those that are no longer retained."""
        state, guard = self.state, self._guard
        guard.states.retain(state.step, guard.healthy)
        self.retain()  # first, so that the new snapshot takes the memory of a dropped one
        self._copy_to(self.snapshots, self.parts)
        self._references[state.step] = guard.state_check.reference(state)
        self.retain()

    def retain(self) -> None:
        """Frees the snapshots that the guard no longer retains."""
        steps = self._guard.states.steps
        self.snapshots.retain(steps)
        self._references = {step: each for step, each in self._references.items() if step in steps}

    def _copy_to(self, snapshots: Snapshots, parts: Mapping[str, Stateful]) -> None:
        tree = capture(self.state, parts)
        snapshots.take(self.state.step, tree, self.state, only_optimizer_writes=self._only_optimizer_writes)

    # ---- choose

    def before_trouble(self) -> int | None:
        """Returns the step of the state that a rollback should restore; None if there is none.

        It is the newest healthy state, or after a slow spike one from before the spike began: as far back as there are
        states.
        """
        before, steps = self._guard.rollback_before, self._guard.states.steps
        if before is None:
            return self._guard.states.target
        return max((step for step in steps if step <= before), default=min(steps, default=None))

    # ---- check

    def newest_intact(self, target: int | None, *, step: int) -> Tree | None:
        """Returns the newest snapshot of at most `target` steps that is finite and has its checksums; None without one.

        The present weights and moments are lost: each snapshot is restored to check it. All ranks must call it.

        Args:
            target: None if there is no state to look for.
            step: the present step, for the report of a damaged snapshot.
        """
        while target is not None and (kept := self.snapshots.newest(target)) is not None:
            # If it is damaged on one rank, no rank may restore it.
            if not self._any_rank(not self._is_intact(kept)):
                return kept
            damaged = kept["step"]
            self.snapshots.drop(damaged)
            self._tracker.event("corrupt_snapshot", step, snapshot=damaged)
            self._tracker.note(f"step {step}: the snapshot after step {damaged} is damaged: not used")
        return None

    def newest_intact_to_save(self, target: int | None) -> Tree | None:
        """Returns the same snapshot, to write it to disk; the present state remains. All ranks must call it."""
        if target is None or not self.snapshots.reaches(target):
            return None
        self._copy_to(self._present, {})
        found = self.newest_intact(target, step=self.state.step)
        restore(self._present.newest(self.state.step), copy(self.state), {})
        self._present.retain([])
        return found

    def _is_intact(self, tree: Tree) -> bool:
        # Checksums need live tensors, so restore weights and moments. The live counts do not change, because the
        # threads that prefetch batches read them.
        trial = copy(self.state)
        restore(tree, trial, {})
        has_checksums = self._guard.state_check.restored(trial, self._references.get(tree["step"]))
        return has_checksums and state_is_sound(trial.model, trial.optimizer)

    # ---- restore

    def restore(self, tree: Tree, cumulative: Mapping[str, dict[str, Any]]) -> None:
        """Restores a state, but for the values in `cumulative`, which keep their present value."""
        restore(tree, self.state, self.parts)
        self.load_cumulative_states(cumulative)

    def cumulative_states(self) -> dict[str, dict[str, Any]]:
        """Returns the values that a rollback does not undo, for each part that has some."""
        parts = self.parts.items()
        return {name: part.cumulative_state() for name, part in parts if isinstance(part, HasCumulativeState)}

    def load_cumulative_states(self, cumulative: Mapping[str, dict[str, Any]]) -> None:
        """Overwrites restored values with those from before the rollback."""
        for name, values in cumulative.items():
            part = self.parts[name]
            assert isinstance(part, HasCumulativeState)
            part.load_cumulative_state(values)
