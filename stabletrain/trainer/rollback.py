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
from stabletrain.trainer.run import Job


@runtime_checkable
class Lasting(Protocol):
    """A part of the state with something that a rollback does not undo: counts, budgets, time."""

    def lasting(self) -> dict[str, Any]: ...
    def keep(self, lasting: dict[str, Any], /) -> None: ...


@dataclass
class Return:
    """What is to be done when the state that a rollback wants has been computed again.

    Attributes:
        step: of that state.
        trouble: step after which the guard asked for the rollback.
        tick, skipped, lasting: what a rollback does not undo.
        tracker: where numbers go again from then on.
    """

    step: int
    trouble: int
    tick: int
    skipped: list[tuple[int, int]]
    lasting: dict[str, dict[str, Any]]
    tracker: NoTracker


class Recovery:
    """Puts states by and back for one run.

    Attributes:
        returning: the state on the way to which steps are run again; None as a rule.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.returning: Return | None = None

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be put by in memory."""
        return self._job.tools.guard.due(step)

    def put_by(self) -> None:
        """Puts the present state by, in memory."""
        job, guard = self._job, self._job.tools.guard
        guard.take(job.state.step)
        job.snapshots.take(job.state.step, capture(job.state, job.parts))
        job.snapshots.keep(guard.held)

    def save(self, val_loss: float | None, *, healthy: bool | None = None) -> None:
        """Takes a checkpoint of everything stateful; whether it is healthy, the guard says where nobody else does.

        If nothing on the disk is as old as the oldest state that rollbacks may ask for, that state is saved too: what
        is in memory is lost when the process is killed.
        """
        state, guard, checkpoints = self._job.state, self._job.tools.guard, self._job.checkpoints
        if self.returning:  # what is on the disk beyond this step is still good
            return
        oldest = min(guard.held, default=state.step)
        if oldest < state.step and not checkpoints.reaches(oldest):
            held = self._job.snapshots.newest(oldest)
            if held is not None:
                val_loss_then = val_loss_of(held["parts"]["history"], held["step"])
                self._write(held, healthy=True, val_loss=val_loss_then, here=False)
        healthy = guard.healthy if healthy is None else healthy
        self._write(capture(state, self._job.parts), healthy=healthy, val_loss=val_loss)

    def _write(self, tree: Tree, *, healthy: bool, val_loss: float | None, here: bool = True) -> None:
        info, anchor = {"run": self._job.folder.id}, min(self._job.tools.guard.held, default=None)
        self._job.checkpoints.save(
            tree["step"], tree, info=info, healthy=healthy, val_loss=val_loss, anchor=anchor, here=here
        )

    def go_back(self, trouble: int, same_data: bool = False) -> None:
        """Puts the newest healthy state back.

        Args:
            trouble: the step after which the guard gave up on the present state.
            same_data: read again what has been read since; neither data nor learning rate were at fault.

        Raises:
            TrainingHalted: no state is left that the run could go back to.
        """
        job, state, guard = self._job, self._job.state, self._job.tools.guard
        self.arrive()  # if the trouble came on the way back already, on a machine that is not deterministic
        target, reason = guard.target, guard.reason
        tree = None if target is None else self._find(target)
        if target is None or tree is None:
            job.tracker.event("halt", trouble, reason=f"{reason}; no healthy state is left to go back to")
            raise TrainingHalted(f"step {trouble}: {reason}; no healthy state is left to go back to")
        target = max(target, tree["step"])
        start, stop = position(target, state.skipped), position(trouble - 1, state.skipped) + 1
        detour = guard.go_back(trouble, target, same_data)
        stop += detour.skip_batches
        passed_over = [] if same_data else [(start, stop)]
        skipped = [*state.skipped, *passed_over]
        lasting = {name: part.lasting() for name, part in job.parts.items() if isinstance(part, Lasting)}
        self.returning = Return(target, trouble, state.tick, skipped, lasting, job.tracker)
        job.tracker.event(
            "rollback",
            trouble,
            to=target,
            loaded=tree["step"],
            tick=state.tick,
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
            self.arrive()

    def arrive(self) -> None:
        """Ends a way back: what a rollback does not undo is put over the restored state, and that is saved."""
        back, job = self.returning, self._job
        if back is None:
            return
        self.returning, job.tracker = None, back.tracker
        job.state.tick, job.state.skipped = back.tick, back.skipped
        for name, lasting in back.lasting.items():
            part = job.parts[name]
            assert isinstance(part, Lasting)
            part.keep(lasting)
        job.history.lost_steps += back.trouble - job.state.step
        job.batches.forget()
        job.snapshots.keep(job.tools.guard.held)
        job.tracker.mark(job.state.step, back.tick)
        job.checkpoints.rewind(job.state.step)
        self.save(val_loss_of(asdict(job.history), job.state.step), healthy=True)

    def preserve(self) -> None:
        """Saves the newest healthy state in memory to the disk: the run is about to end, and its weights are bad.

        What a rollback does not undo is put over it, so that a run which is resumed from it goes on from there.
        """
        job, target = self._job, self._job.tools.guard.target
        tree = None if target is None else job.snapshots.newest(target)
        if tree is None:
            return
        parts = dict(tree["parts"])
        for name, part in job.parts.items():
            if isinstance(part, Lasting):
                parts[name] = {**parts[name], **part.lasting()}
        over = {"tick": job.state.tick, "skipped": [list(span) for span in job.state.skipped], "parts": parts}
        self._write({**tree, **over}, healthy=True, val_loss=val_loss_of(tree["parts"]["history"], tree["step"]))
        job.tracker.mark(tree["step"], job.state.tick)

    def give_up_the_way(self) -> None:
        """Ends a way back before it has led anywhere: the disk has all that it needs to begin it again."""
        if self.returning:
            self._job.tracker, self.returning = self.returning.tracker, None

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
