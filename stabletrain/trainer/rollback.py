"""The run's saved states: kept in memory, written to disk, and restored when the guard asks for it or a run resumes.

A rollback restores the newest healthy state, and the run then skips the data it has read since. The state comes from
memory or from disk. If neither has it, an older one is loaded and its steps are executed again, silently, up to the
state that is wanted. A step is a pure function of its state and number, so this gives the same bits: a run that was
killed and resumed rolls back exactly as one that never was.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stabletrain.checkpoint.capture import Snapshots, Stateful, capture, restore, sharded_tensors
from stabletrain.checkpoint.tree import Tree
from stabletrain.data.order import position
from stabletrain.errors import TrainingHalted
from stabletrain.protocols import Guard
from stabletrain.records import Detour, TrainState
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.history import History
from stabletrain.trainer.roles import Batches, Checkpoints, Tracker


@runtime_checkable
class HasCumulativeState(Protocol):
    """A part of the state with something that a rollback does not undo: counts, budgets, time."""

    def cumulative_state(self) -> dict[str, Any]: ...
    def load_cumulative_state(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class PendingReplay:
    """What remains to be done once the state that a rollback wants has been computed again.

    Attributes:
        step: of that state.
        trouble: the step after which the guard asked for the rollback.
        executed_steps, skipped, cumulative: what a rollback does not undo.
    """

    step: int
    trouble: int
    executed_steps: int
    skipped: list[tuple[int, int]]
    cumulative: dict[str, dict[str, Any]]


class Rollback:
    """Saves and restores the states of one run.

    Attributes:
        state: the live state.
        parts: everything stateful beside model and optimizer, by name.
        snapshots: states in memory.
        checkpoints: states on disk.
        replaying: set while steps are executed again to reach the state that a rollback wants.

    Args:
        history: of the run.
        guard: says which states to keep and which are healthy.
        batches: prefetched for the data order before a rollback; forgotten after it.
        tracker: where events and messages go.
        run_id: of the run, kept with each checkpoint.
    """

    def __init__(
        self,
        state: TrainState,
        parts: Mapping[str, Stateful],
        *,
        history: History,
        guard: Guard,
        checkpoints: Checkpoints,
        batches: Batches,
        tracker: Tracker,
        run_id: str,
    ) -> None:
        self.state, self.parts, self.checkpoints = state, parts, checkpoints
        self.snapshots = Snapshots()
        self.replaying: PendingReplay | None = None
        self._history, self._guard, self._batches = history, guard, batches
        self._retained = guard.states
        self._tracker, self._run_id = tracker, run_id
        self._silent = NoTracker()

    @property
    def tracker(self) -> Tracker:
        """Where the steps now executed are logged: nowhere during a replay, since they were logged before."""
        return self._silent if self.replaying else self._tracker

    # ---- saving

    def snapshot_due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be kept in memory."""
        return self._retained.due(step)

    def take_snapshot(self) -> None:
        """Keeps the present state in memory."""
        self._retained.retain(self.state.step, self._guard.healthy)
        self.snapshots.take(self.state.step, capture(self.state, self.parts))
        self.snapshots.retain(self._retained.steps)

    def save(self, val_loss: float | None, *, healthy: bool | None = None) -> None:
        """Writes a checkpoint of everything stateful.

        Args:
            val_loss: of this state, nats per target; None if it was not evaluated.
            healthy: whether the state is; None leaves that to the guard.
        """
        if self.replaying:  # the checkpoints of later steps are still valid
            return
        # What is in memory is lost if the process is killed, so the disk must hold a state at least as old as the
        # oldest one that a rollback may ask for.
        oldest = min(self._retained.steps, default=self.state.step)
        if oldest < self.state.step and not self.checkpoints.reaches(oldest):
            kept = self.snapshots.newest(oldest)
            if kept is not None:
                self._write(
                    kept, healthy=True, val_loss=val_loss_of(kept["parts"]["history"], kept["step"]), here=False
                )
        healthy = self._guard.healthy if healthy is None else healthy
        self._write(capture(self.state, self.parts), healthy=healthy, val_loss=val_loss)

    def save_last_healthy(self) -> None:
        """Writes the newest healthy state in memory to disk: the run is about to end, and its weights are bad.

        What a rollback does not undo is put over it, so a run resumed from it continues with those counts.
        """
        target = self._retained.target
        tree = None if target is None else self.snapshots.newest(target)
        if tree is None:
            return
        parts = dict(tree["parts"])
        for name, state in self._cumulative_states().items():
            parts[name] = {**parts[name], **state}
        skipped = [list(span) for span in self.state.skipped]
        over = {"tick": self.state.executed_steps, "skipped": skipped, "parts": parts}
        self._write({**tree, **over}, healthy=True, val_loss=val_loss_of(tree["parts"]["history"], tree["step"]))
        self.tracker.mark(tree["step"], self.state.executed_steps)

    def _write(self, tree: Tree, *, healthy: bool, val_loss: float | None, here: bool = True) -> None:
        anchor = min(self._retained.steps, default=None)
        self.checkpoints.save(
            tree["step"],
            tree,
            info={"run": self._run_id},
            healthy=healthy,
            val_loss=val_loss,
            anchor=anchor,
            here=here,
        )

    # ---- going back

    def older_state(self, step: int) -> Tree | None:
        """The newest state in memory of at most `step` steps; None if there is none."""
        return self.snapshots.newest(step)

    def resume(self, resume: str) -> None:
        """Restores the checkpoint that `resume` asks for, and says so.

        Args:
            resume: `none`; `auto` for the checkpoint this run folder prefers (`Checkpoints.preferred`); a run folder,
                for the same of that; or a checkpoint, which is taken as it is.
        """
        if resume == "none":
            return
        found = self.checkpoints.preferred() if resume == "auto" else self.checkpoints.find(Path(resume))
        tracker = self.tracker
        if found is not None:
            restore(found.load(sharded_tensors(self.state)), self.state, self.parts)
            tracker.event("resume", self.state.step, checkpoint=found.path.name, healthy=found.healthy)
            tracker.note(f"resumed after step {self.state.step}, from {found.path}")
            if not found.healthy and Path(resume).absolute() == found.path.absolute():  # otherwise said already
                tracker.note(f"resume: {found.path.name} is not healthy: its weights or moments may not be finite")
        elif tracker.started():
            tracker.event("restart", 0, reason="no usable checkpoint")
            tracker.note("resume: no usable checkpoint is left here; the run starts again from step 0")

    def roll_back(self, trouble: int, same_data: bool = False) -> None:
        """Restores the newest healthy state.

        Args:
            trouble: the step after which the guard gave up on the present state.
            same_data: read the same data again; neither data nor learning rate were at fault.

        Raises:
            TrainingHalted: no healthy state is left.
        """
        self.finish_replay()  # the trouble may have come during a replay, on a machine that is not deterministic
        target, reason = self._retained.target, self._guard.reason
        tree = None if target is None else self._find(target)
        if target is None or tree is None:
            self.tracker.event("halt", trouble, reason=f"{reason}; no healthy state is left to go back to")
            raise TrainingHalted(f"step {trouble}: {reason}; no healthy state is left to go back to")
        target = max(target, tree["step"])
        # The data since that state lie at positions start to stop: the order of the data, without what is skipped.
        start, stop = position(target, self.state.skipped), position(trouble - 1, self.state.skipped) + 1
        detour = self._guard.begin_rollback(trouble, target, same_data)
        stop += detour.skip_batches
        self._announce(trouble, target, tree["step"], detour, None if same_data else (start, stop), (start, stop))
        skipped = [*self.state.skipped, *([] if same_data else [(start, stop)])]
        replaying = PendingReplay(target, trouble, self.state.executed_steps, skipped, self._cumulative_states())
        restore(tree, self.state, self.parts)
        self._batches.forget()
        if self.state.step < target:
            self.tracker.note(f"rollback: steps {self.state.step + 1} to {target} are run again to reach that state")
        self.replaying = replaying
        if self.state.step >= target:
            self.finish_replay()

    def finish_replay(self) -> None:
        """Puts over the restored state what a rollback does not undo, and saves it. Does nothing without a replay."""
        done = self.replaying
        if done is None:
            return
        self.replaying = None
        self.state.executed_steps, self.state.skipped = done.executed_steps, done.skipped
        for name, state in done.cumulative.items():
            part = self.parts[name]
            assert isinstance(part, HasCumulativeState)
            part.load_cumulative_state(state)
        self._history.lost_steps += done.trouble - self.state.step
        self._batches.forget()
        self.snapshots.retain(self._retained.steps)
        self.tracker.mark(self.state.step, done.executed_steps)
        self.checkpoints.rewind(self.state.step)
        self.save(val_loss_of(asdict(self._history), self.state.step), healthy=True)

    def abort_replay(self) -> None:
        """Ends a replay early: the disk has all that is needed to begin it again."""
        self.replaying = None

    def _announce(
        self,
        trouble: int,
        target: int,
        loaded: int,
        detour: Detour,
        skipped: tuple[int, int] | None,
        read: tuple[int, int],
    ) -> None:
        """Records the rollback and shows it."""
        tracker, reason = self.tracker, self._guard.reason
        tracker.event(
            "rollback",
            trouble,
            to=target,
            loaded=loaded,
            tick=self.state.executed_steps,
            skipped=[] if skipped is None else [*skipped],
            lr_factor=detour.lr_factor,
            reason=reason,
        )
        slower = f", learning rate x {detour.lr_factor:g} until step {detour.until}" if detour.lr_factor < 1 else ""
        text = (
            f"step {trouble}: {reason}: rollback {detour.number}, to step {target}; batches {read[0]} to {read[1] - 1} "
            f"are {'read again' if skipped is None else 'passed over'}{slower}"
        )
        tracker.note(text)
        tracker.alert("rollback", text)

    def _cumulative_states(self) -> dict[str, dict[str, Any]]:
        parts = self.parts.items()
        return {name: part.cumulative_state() for name, part in parts if isinstance(part, HasCumulativeState)}

    def _find(self, target: int) -> Any:
        """The newest state up to step `target`, in memory or on disk; otherwise the oldest healthy one."""
        kept = self.snapshots.newest(target)
        if kept is not None and kept["step"] == target:
            return kept
        saved = self.checkpoints.newest(at_most=target) or self.checkpoints.oldest()
        if kept is not None and (saved is None or kept["step"] >= saved.step):
            return kept
        return saved.load(sharded_tensors(self.state)) if saved is not None else None


def val_loss_of(history: Mapping[str, Any], step: int) -> float | None:
    """The validation loss of the state after `step` steps, if the newest evaluation was of that very state."""
    return history["val"].get("val/loss") if history.get("val_step") == step else None
