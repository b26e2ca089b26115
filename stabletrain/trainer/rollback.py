"""Recovery: states are put by, in memory and on the disk, and put back when the guard asks for it.

A rollback puts the newest healthy state back, in memory, from the disk, or computed again, and then everything that has
been read since lies behind the run. Computed again means: an older state is loaded and its steps are run a second time,
silently, up to the one that is wanted. As a step is a pure function of its state and number this leads to the same
bits, so a run that was killed and resumed rolls back exactly as one that never was.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from stabletrain.checkpoint.capture import capture, restore, sharded_tensors
from stabletrain.checkpoint.tree import Tree
from stabletrain.data.order import position
from stabletrain.errors import TrainingHalted
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.run import TrainingRun


@runtime_checkable
class HasCumulativeState(Protocol):
    """A part of the state with something that a rollback does not undo: counts, budgets, time."""

    def cumulative_state(self) -> dict[str, Any]: ...
    def load_cumulative_state(self, lasting: dict[str, Any], /) -> None: ...


@dataclass
class PendingReplay:
    """What is to be done when the state that a rollback wants has been computed again.

    Attributes:
        step: of that state.
        trouble: step after which the guard asked for the rollback.
        executed_steps, skipped, cumulative: what a rollback does not undo.
        tracker: where numbers go again from then on.
    """

    step: int
    trouble: int
    executed_steps: int
    skipped: list[tuple[int, int]]
    cumulative: dict[str, dict[str, Any]]
    tracker: NoTracker


class Rollback:
    """Puts states by and back for one run.

    Attributes:
        returning: the state on the way to which steps are run again; None as a rule.
    """

    def __init__(self, job: TrainingRun) -> None:
        self._job = job
        self.replaying: PendingReplay | None = None

    def snapshot_due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be put by in memory."""
        return self._job.tools.guard.snapshot_due(step)

    def take_snapshot(self) -> None:
        """Puts the present state by, in memory."""
        job, guard = self._job, self._job.tools.guard
        guard.retain(job.state.step)
        job.snapshots.take(job.state.step, capture(job.state, job.parts))
        job.snapshots.retain(guard.retained_steps)

    def save(self, val_loss: float | None, *, healthy: bool | None = None) -> None:
        """Takes a checkpoint of everything stateful; whether it is healthy, the guard says where nobody else does.

        If nothing on the disk is as old as the oldest state that rollbacks may ask for, that state is saved too: what
        is in memory is lost when the process is killed.
        """
        state, guard, checkpoints = self._job.state, self._job.tools.guard, self._job.checkpoints
        if self.replaying:  # what is on the disk beyond this step is still good
            return
        oldest = min(guard.retained_steps, default=state.step)
        if oldest < state.step and not checkpoints.reaches(oldest):
            held = self._job.snapshots.newest(oldest)
            if held is not None:
                val_loss_then = val_loss_of(held["parts"]["history"], held["step"])
                self._write(held, healthy=True, val_loss=val_loss_then, here=False)
        healthy = guard.healthy if healthy is None else healthy
        self._write(capture(state, self._job.parts), healthy=healthy, val_loss=val_loss)

    def _write(self, tree: Tree, *, healthy: bool, val_loss: float | None, here: bool = True) -> None:
        info, anchor = {"run": self._job.folder.id}, min(self._job.tools.guard.retained_steps, default=None)
        self._job.checkpoints.save(
            tree["step"], tree, info=info, healthy=healthy, val_loss=val_loss, anchor=anchor, here=here
        )

    def roll_back(self, trouble: int, same_data: bool = False) -> None:
        """Puts the newest healthy state back.

        Args:
            trouble: the step after which the guard gave up on the present state.
            same_data: read again what has been read since; neither data nor learning rate were at fault.

        Raises:
            TrainingHalted: no state is left that the run could go back to.
        """
        job, state, guard = self._job, self._job.state, self._job.tools.guard
        self.finish_replay()  # if the trouble came on the way back already, on a machine that is not deterministic
        target, reason = guard.target, guard.reason
        tree = None if target is None else self._find(target)
        if target is None or tree is None:
            job.tracker.event("halt", trouble, reason=f"{reason}; no healthy state is left to go back to")
            raise TrainingHalted(f"step {trouble}: {reason}; no healthy state is left to go back to")
        target = max(target, tree["step"])
        start, stop = position(target, state.skipped), position(trouble - 1, state.skipped) + 1
        detour = guard.begin_rollback(trouble, target, same_data)
        stop += detour.skip_batches
        passed_over = [] if same_data else [(start, stop)]
        skipped = [*state.skipped, *passed_over]
        lasting = {
            name: part.cumulative_state() for name, part in job.parts.items() if isinstance(part, HasCumulativeState)
        }
        self.replaying = PendingReplay(target, trouble, state.executed_steps, skipped, lasting, job.tracker)
        job.tracker.event(
            "rollback",
            trouble,
            to=target,
            loaded=tree["step"],
            tick=state.executed_steps,
            skipped=[] if same_data else [start, stop],
            lr_factor=detour.lr_factor,
            reason=reason,
        )
        slower = f", learning rate x {detour.lr_factor:g} until step {detour.until}" if detour.lr_factor < 1 else ""
        text = (
            f"step {trouble}: {reason}: rollback {detour.number}, to step {target}; batches {start} to {stop - 1} "
            f"are {'read again' if same_data else 'passed over'}{slower}"
        )
        job.tracker.note(text)
        job.tracker.alert("rollback", text)
        restore(tree, state, job.parts)
        job.batches.forget()
        if state.step < target:
            job.tracker.note(f"rollback: steps {state.step + 1} to {target} are run again to reach that state")
            job.tracker = NoTracker()
        else:
            self.finish_replay()

    def finish_replay(self) -> None:
        """Ends a way back: what a rollback does not undo is put over the restored state, and that is saved."""
        back, job = self.replaying, self._job
        if back is None:
            return
        self.replaying, job.tracker = None, back.tracker
        job.state.executed_steps, job.state.skipped = back.executed_steps, back.skipped
        for name, lasting in back.cumulative.items():
            part = job.parts[name]
            assert isinstance(part, HasCumulativeState)
            part.load_cumulative_state(lasting)
        job.history.lost_steps += back.trouble - job.state.step
        job.batches.forget()
        job.snapshots.retain(job.tools.guard.retained_steps)
        job.tracker.mark(job.state.step, back.executed_steps)
        job.checkpoints.rewind(job.state.step)
        self.save(val_loss_of(asdict(job.history), job.state.step), healthy=True)

    def save_last_healthy(self) -> None:
        """Saves the newest healthy state in memory to the disk: the run is about to end, and its weights are bad.

        What a rollback does not undo is put over it, so that a run which is resumed from it goes on from there.
        """
        job, target = self._job, self._job.tools.guard.target
        tree = None if target is None else job.snapshots.newest(target)
        if tree is None:
            return
        parts = dict(tree["parts"])
        for name, part in job.parts.items():
            if isinstance(part, HasCumulativeState):
                parts[name] = {**parts[name], **part.cumulative_state()}
        over = {"tick": job.state.executed_steps, "skipped": [list(span) for span in job.state.skipped], "parts": parts}
        self._write({**tree, **over}, healthy=True, val_loss=val_loss_of(tree["parts"]["history"], tree["step"]))
        job.tracker.mark(tree["step"], job.state.executed_steps)

    def abort_replay(self) -> None:
        """Ends a way back before it has led anywhere: the disk has all that it needs to begin it again."""
        if self.replaying:
            self._job.tracker, self.replaying = self.replaying.tracker, None

    def _find(self, target: int) -> Any:
        """The newest state up to step `target`, of those in memory and on the disk; else the oldest healthy one."""
        job = self._job
        held = job.snapshots.newest(target)
        if held is not None and held["step"] == target:
            return held
        saved = job.checkpoints.newest(at_most=target) or job.checkpoints.oldest()
        if held is not None and (saved is None or held["step"] >= saved.step):
            return held
        return saved.load(sharded_tensors(job.state)) if saved is not None else None


def val_loss_of(history: Mapping[str, Any], step: int) -> float | None:
    """The validation loss of the state after `step` steps, if the newest evaluation was of that very state."""
    return history["val"].get("val/loss") if history.get("val_step") == step else None
