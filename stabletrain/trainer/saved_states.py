"""The run's saved states: the snapshots in memory of `guard/states.py`, and checkpoints on disk.

Snapshots are restored by a rollback, and are lost with the process. Checkpoints are restored by a resume, and by a
rollback that finds no snapshot. `rollback.py` goes back to the state that is chosen here.
"""

from collections.abc import Callable, Mapping

from stabletrain.checkpoint.capture import Stateful, capture, sharded_tensors
from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.checkpoint.reader import UnusableCheckpoint
from stabletrain.checkpoint.tree import Tree
from stabletrain.guard.policy import NoGuard
from stabletrain.guard.states import KeptStates
from stabletrain.records import TrainState
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.changes import NoResumption
from stabletrain.trainer.history import HealingHistory


class SavedStates(KeptStates):
    """Saves the states of one run in memory and on disk, and finds the one to restore; see also `KeptStates`.

    Attributes:
        checkpoints: states on disk.
        healing: how the run was healed so far.
        resumption: fits checkpoints to changed settings.
        resumed_healthy: whether the run was resumed from a healthy checkpoint (`resume.py`).

    Args:
        tracker: receives events and messages.
        run_id: stored in each checkpoint.
        resumption: None restores checkpoints unchanged.
    """

    def __init__(
        self,
        state: TrainState,
        parts: Mapping[str, Stateful],
        *,
        guard: NoGuard,
        checkpoints: NoCheckpoints,
        tracker: NoTracker,
        run_id: str,
        resumption: NoResumption | None = None,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        super().__init__(state, parts, guard=guard, tracker=tracker, any_rank=any_rank)
        self.checkpoints, self.healing = checkpoints, HealingHistory()
        self.resumed_healthy, self._run_id = False, run_id
        self.resumption: NoResumption = resumption or NoResumption()

    # ---- saving

    def keep_before_new_settings(self, *, pin: bool) -> None:
        """Takes a snapshot of the resumed state, before the first step with other settings.

        Steps from before the change could not be replayed to reach this state.

        Args:
            pin: whether no rollback may restore an older state.
        """
        if self._guard.states.target is None:
            return
        if pin and self.resumed_healthy:
            self._guard.states.pin(self.state.step)
        self.take_snapshot()

    def save(self, val_loss: float | None, *, healthy: bool | None = None) -> None:
        """Writes a checkpoint of the present state.

        Args:
            val_loss: validation loss of this state, nats per target; None if it was not evaluated.
            healthy: whether to mark it as healthy; None asks the guard.
        """
        # Snapshots are lost if the process is killed. A resumed run then replays the state that a rollback needs, from
        # a checkpoint at least as old as this state. So the disk must hold one as old as the oldest retained state.
        oldest = min(self._guard.states.steps, default=self.state.step)
        if oldest < self.state.step and not self.checkpoints.reaches(oldest):
            kept = self.newest_intact_to_save(oldest)
            if kept is not None:
                self._write(kept, healthy=True, val_loss=val_loss_of(kept), here=False)
        healthy = self._guard.healthy if healthy is None else healthy
        self._write(capture(self.state, self.parts), healthy=healthy, val_loss=val_loss)

    def save_last_healthy(self) -> int | None:
        """Writes the newest healthy snapshot that is intact, because the run halts and its present weights may be bad.

        Values that a rollback does not undo are taken from the present state, so a resumed run continues its counts.

        Returns:
            number of steps of that state; None if there is none.
        """
        tree = self.newest_intact_to_save(self._guard.states.target)
        if tree is None:
            return None
        parts = dict(tree["parts"])
        for name, state in self.cumulative_states().items():
            parts[name] = {**parts[name], **state}
        skipped = [list(span) for span in self.state.skipped]
        over = {"tick": self.state.executed_steps, "skipped": skipped, "parts": parts}
        self._write({**tree, **over}, healthy=True, val_loss=val_loss_of(tree))
        return tree["step"]

    def _write(self, tree: Tree, *, healthy: bool, val_loss: float | None, here: bool = True) -> None:
        forecast = getattr(self.parts.get("forecast"), "kept", ())
        self.checkpoints.save(
            tree["step"],
            tree,
            info={"run": self._run_id, **self.resumption.info()},
            healthy=healthy,
            val_loss=val_loss,
            anchors=[*self._guard.states.steps, *self.healing.resumed_steps, *forecast],
            here=here,
        )

    def discard_later(self) -> None:
        """Deletes the checkpoints of later steps than the present one, which the run will reach with other data."""
        self.checkpoints.rewind(self.state.step)
        self.resumption.went_back(self.state.step)

    # ---- restoring

    def before_trouble(self) -> int | None:
        """Returns the step of the state that a rollback should restore; None if there is none.

        See `KeptStates`. If all snapshots are from after a slow spike began, a checkpoint may be older.
        """
        # The newest healthy snapshot, unless a slow spike began before all of them.
        found, before = super().before_trouble(), self._guard.rollback_before
        if before is None or (found is not None and found <= before):
            return found
        if (pinned := self._guard.states.pinned) is not None:
            return pinned
        saved = self.checkpoints.newest(healthy_only=True, at_most=before)
        return found if saved is None else saved.step

    def find(self, target: int) -> tuple[Tree, int] | None:
        """Returns a state to restore, and the step up to which to replay from it; None if no intact state is left.

        The state is the newest one of at most `target` steps, from memory or disk; else the oldest healthy one.
        """
        # A snapshot of exactly this state needs neither the disk nor a replay.
        kept = self.newest_intact(target, step=self.state.step)
        if kept is not None and kept["step"] == target:
            return kept, target
        # Otherwise the newer of snapshot and checkpoint, for the shortest replay. Each checkpoint that cannot be loaded
        # is rejected on all ranks, and the next one is tried.
        trees: list[Tree] = []
        while (saved := self.checkpoints.newest(at_most=target) or self.checkpoints.oldest()) is not None:
            if kept is not None and kept["step"] >= saved.step:
                return kept, target
            fault = ""
            try:
                trees = [saved.load(sharded_tensors(self.state))]
            except UnusableCheckpoint as error:
                fault = str(error)
            if self.checkpoints.accept(saved, fault):
                break
        if saved is None:
            return None if kept is None else (kept, target)
        tree = self.resumption.fit(saved, trees[0])
        # Steps from before a resume that changed settings would not be the same steps again, so they are not replayed:
        # the run continues from the checkpoint itself. It is older than a healthy state, so it is healthy as well.
        return tree, max(target, saved.step) if self.resumption.replayable(saved, target) else saved.step


def val_loss_of(tree: Tree) -> float | None:
    """Returns the validation loss of a saved state; None if that state was not evaluated."""
    history = tree["parts"]["history"]
    return history["val"].get("val/loss") if history.get("val_step") == tree["step"] else None
