"""The run's saved states: snapshots in memory and checkpoints on disk, restored by a rollback or a resume.

A rollback restores the newest healthy state, and the run then skips the data that it has read since. If memory or
arithmetic failed, `put_back` restores the state after a step that is known to be good, and nothing is skipped. If
neither memory nor disk has the state, an older one is loaded, and the steps in between are replayed without logging. A
step is a pure function of state and step number, so the replay gives the same bits: a run that was killed and resumed
rolls back exactly as one that was never interrupted, and a state that was put back is the one that was lost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stabletrain.checkpoint.capture import Stateful, capture, restore, sharded_tensors
from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.checkpoint.reader import Checkpoint, UnusableCheckpoint
from stabletrain.checkpoint.snapshots import Snapshots
from stabletrain.checkpoint.sound import check_state
from stabletrain.checkpoint.tree import Tree
from stabletrain.data.order import position
from stabletrain.data.prefetch import Prefetch
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.records import Detour, TrainState
from stabletrain.stability.guard import NoGuard
from stabletrain.stability.guard.written import state_is_finite
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.changes import NoResumption
from stabletrain.trainer.history import History


@runtime_checkable
class HasCumulativeState(Protocol):
    """A part of the state with values that a rollback does not undo: counts, budgets, time."""

    def cumulative_state(self) -> dict[str, Any]: ...
    def load_cumulative_state(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class PendingReplay:
    """What to restore once a replay has reached the state that a rollback needs.

    Attributes:
        step: number of steps of that state.
        trouble: the step after which the guard asked for the rollback.
        executed_steps, skipped, cumulative: values that a rollback does not undo.
        keeps_later: whether what was logged and saved after that state remains, because the run comes to it again.
        used: whether that state was evaluated and saved already, if it was due.
    """

    step: int
    trouble: int
    executed_steps: int
    skipped: list[tuple[int, int]]
    cumulative: dict[str, dict[str, Any]]
    keeps_later: bool = False
    used: bool = True


class Rollback:
    """Saves and restores the states of one run.

    Attributes:
        state: the live state.
        parts: every stateful object other than model and optimizer, by its name in checkpoints.
        snapshots: states in memory.
        checkpoints: states on disk.
        replaying: set while steps are replayed to reach the state that a rollback needs.
        kept: steps of the states from which a healed run went on; retention keeps their checkpoints.
        healed_by: the arms with which the run went on after its halts.
        whatif_steps: steps spent on arms after all halts.

    Args:
        history: what the run records about itself.
        guard: decides which states to retain and which are healthy.
        batches: prefetched batches, which a rollback invalidates.
        tracker: receives events and messages.
        run_id: stored in each checkpoint.
        resumption: fits checkpoints to changed settings; None restores them as they are.
        any_rank: returns whether its argument is true on any rank.
    """

    def __init__(
        self,
        state: TrainState,
        parts: Mapping[str, Stateful],
        *,
        history: History,
        guard: NoGuard,
        checkpoints: NoCheckpoints,
        batches: Prefetch,
        tracker: NoTracker,
        run_id: str,
        resumption: NoResumption | None = None,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self.state, self.parts, self.checkpoints = state, parts, checkpoints
        self.snapshots = Snapshots()
        self._references: dict[int, Any] = {}  # by snapshot: the checksums that it must have when it is put back
        self.replaying: PendingReplay | None = None
        self.kept: Sequence[int] = ()
        self.healed_by: Sequence[str] = ()
        self.whatif_steps = 0
        self._resumed_healthy = False
        self._history, self._guard, self._batches = history, guard, batches
        self._retained = guard.states
        self._tracker, self._run_id = tracker, run_id
        self._silent = NoTracker()
        self._resumption = resumption or NoResumption()
        self._any_rank = any_rank

    @property
    def tracker(self) -> NoTracker:
        """Where steps are logged; a null tracker during a replay, because those steps are in the log already."""
        return self._silent if self.replaying else self._tracker

    def healings(self) -> dict[str, int]:
        """Returns the number of healings so far; empty without `guard.escalate=whatif`."""
        return {"guard/healings": len(self.healed_by)} if self._guard.escalate == "whatif" else {}

    # ---- saving

    def snapshot_due(self, step: int) -> bool:
        """Returns whether to take a snapshot after `step` steps."""
        return self._retained.due(step)

    def begin_anew(self, *, pin: bool) -> None:
        """Keeps the present state, from which the run goes on with other settings.

        Args:
            pin: whether no rollback may go back beyond it.
        """
        if self._retained.target is None:
            return
        if pin and self._resumed_healthy:
            self._retained.pin(self.state.step)
        self.take_snapshot()  # steps from before the change cannot be replayed to reach this state

    def take_snapshot(self) -> None:
        """Takes a snapshot of the present state, and frees those that are no longer retained."""
        self._retained.retain(self.state.step, self._guard.healthy)
        self.snapshots.retain(self._retained.steps)  # first, so that the new snapshot takes the memory of a dropped one
        self.snapshots.take(self.state.step, capture(self.state, self.parts), self.state)
        steps = self._retained.steps
        self._references = {step: each for step, each in self._references.items() if step in steps}
        self._references[self.state.step] = self._guard.state_check.reference(self.state)
        self.snapshots.retain(self._retained.steps)

    def save(self, val_loss: float | None, *, healthy: bool | None = None) -> None:
        """Writes a checkpoint of the present state.

        Args:
            val_loss: validation loss of this state, nats per target; None if it was not evaluated.
            healthy: whether to mark it as healthy; None asks the guard.
        """
        if self.replaying:  # these steps were saved when they first ran
            return
        # Snapshots are lost if the process is killed. A resumed run then replays the state that a rollback needs, from
        # a checkpoint at least as old as this state. So the disk must hold one as old as the oldest retained state.
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
        """Writes the newest healthy snapshot to disk, because the run halts and its present weights may be bad.

        Values that a rollback does not undo are taken from the present state, so a resumed run continues its counts.
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
        self.checkpoints.save(
            tree["step"],
            tree,
            info={"run": self._run_id, **self._resumption.info()},
            healthy=healthy,
            val_loss=val_loss,
            anchors=[*self._retained.steps, *self.kept, *getattr(self.parts.get("forecast"), "kept", ())],
            here=here,
        )

    # ---- going back

    def older_state(self, step: int) -> Tree | None:
        """Returns the newest snapshot of at most `step` steps as it lies on the host; None if there is none."""
        return self.snapshots.newest(step)

    def resume(self, resume: str) -> None:
        """Restores the checkpoint that `resume` names, and reports it.

        Args:
            resume: `none`; `auto` for the preferred checkpoint of this run folder (`Checkpoints.preferred`); another
                run folder, for its preferred checkpoint; or a checkpoint folder.
        """
        if resume == "none":
            return
        tracker = self.tracker
        if resume == "auto":
            found = self._first_usable(self.checkpoints.preferred, self._resume_from)
        else:
            found = self.checkpoints.find(Path(resume))
            self._resume_from(found)
        if found is not None:
            self._resumed_healthy = found.healthy
            tracker.event("resume", self.state.step, checkpoint=found.path.name, healthy=found.healthy)
            tracker.note(f"resumed after step {self.state.step}, from {found.path}")
            # If the folder was searched, the search has reported this already.
            if not found.healthy and Path(resume).absolute() == found.path.absolute():
                tracker.note(f"resume: {found.path.name} is not healthy: its weights or moments may not be finite")
        elif tracker.started():
            tracker.event("restart", 0, reason="no usable checkpoint")
            tracker.note("resume: no usable checkpoint is left here; the run starts again from step 0")

    def _resume_from(self, found: Checkpoint) -> None:
        restore(self._resumption.resume(found, self._load(found)), self.state, self.parts)

    def _load(self, found: Checkpoint) -> Tree:
        """Returns a checkpoint's state; raises UnusableCheckpoint if it cannot be that of the run."""
        tree = found.load(sharded_tensors(self.state))
        try:
            check_state(tree, self.state.model, self.parts)
        except ValueError as error:
            raise UnusableCheckpoint(f"{found.path}: its state is damaged: {error}") from error
        return tree

    def _first_usable(
        self, look: Callable[[], Checkpoint | None], use: Callable[[Checkpoint], None]
    ) -> Checkpoint | None:
        """Uses the first checkpoint that can be used; returns it, or None if there is none.

        Args:
            look: returns the next checkpoint that was not rejected.
            use: raises UnusableCheckpoint if the checkpoint cannot be used.

        Raises:
            ConfigError: there are checkpoints that verify, and none of them can be used. The run does not begin anew.
        """
        faults = []
        while (found := look()) is not None:
            fault = ""
            try:
                use(found)
            except UnusableCheckpoint as error:
                fault = str(error)
            if self.checkpoints.accept(found, fault):
                return found
            faults.append(fault)
        if faults:
            raise ConfigError(
                f"no checkpoint of this run can be restored ({faults[0]}): resume with the version of stabletrain that "
                "wrote them, or start a new run in another folder"
            )
        return None

    def put_back(self, step: int, *, trouble: int, used: bool) -> None:
        """Restores the state after `step` steps, which is lost because memory or arithmetic failed, bit for bit.

        Takes the newest intact state of at most that step, and replays the steps since. On a device whose kernels add
        in any order, the replay gives the same state up to rounding.

        Args:
            step: number of steps of the wanted state.
            trouble: the step at which the fault was found.
            used: see `PendingReplay`.

        Raises:
            TrainingHalted: no intact state is left.
        """
        # Counts and skipped data are those of now, in the replay as well: the lost state was reached with them.
        skipped, executed, cumulative = self.state.skipped, self.state.executed_steps, self._cumulative_states()
        if (pending := self.replaying) is not None:  # it happened in a replay, which begins anew
            step, skipped, executed, used = pending.step, pending.skipped, pending.executed_steps, pending.used
            cumulative = {**pending.cumulative, "guard": cumulative["guard"]}
            self.replaying = None
        reason, tracker = self._guard.reason, self._tracker
        found = self._find(step)
        if found is None:
            reason = f"{reason}; no intact state is left to go back to"
            self.note_halt(trouble, reason, machine=True)
            raise TrainingHalted(f"step {trouble}: {reason}")
        tree, target = found
        loaded = tree["step"]
        tracker.event("restore", trouble, to=target, loaded=loaded, tick=executed, reason=reason)
        text = f"step {trouble}: {reason}: the state after step {target} is put back"
        text += f", from step {loaded}" if loaded < target else ""
        tracker.note(f"{text}; no data are skipped")
        tracker.alert("state put back", text)
        restore(tree, self.state, self.parts)
        self.state.skipped = skipped
        self.parts["guard"].load_cumulative_state(cumulative["guard"])  # ty: ignore[missing-attribute]
        self._guard.reason = reason
        self._batches.forget()
        self.replaying = PendingReplay(target, trouble, executed, skipped, cumulative, target == step, used)
        if self.state.step >= target:
            self.finish_replay()

    def roll_back(self, trouble: int) -> None:
        """Restores the newest healthy state that the guard wants, and skips the data that was read since.

        Args:
            trouble: the step after which the guard gave up on the present state.

        Raises:
            TrainingHalted: no healthy state is left.
        """
        # On a machine that is not deterministic, trouble may come in the middle of a replay. End that replay first.
        self.finish_replay()
        wanted, reason = self._wanted(), self._guard.reason
        found = None if wanted is None else self._find(wanted)
        pinned = self._retained.pinned
        if found is not None and pinned is not None and found[1] < pinned:
            found = None
            reason += f"; the state of step {pinned}, from which the run was resumed with other settings, is damaged"
        if found is None:
            reason = f"{reason}; no healthy state is left to go back to"
            self.note_halt(trouble, reason, machine=False)
            raise TrainingHalted(f"step {trouble}: {reason}")
        tree, target = found
        # Reading the same batches again would lead to the same weights again, bit for bit. So skip everything between
        # the restored state and the trouble, as PaLM did. `start` and `stop` are data positions, not step numbers.
        start, stop = position(target, self.state.skipped), position(trouble - 1, self.state.skipped) + 1
        detour = self._guard.begin_rollback(trouble, target)
        stop += detour.skip_batches
        self._announce(trouble, target, tree["step"], detour, (start, stop))
        skipped = [*self.state.skipped, (start, stop)]
        # Counts, budgets and skipped data must survive the restore: keep them until the target state is reached.
        replaying = PendingReplay(target, trouble, self.state.executed_steps, skipped, self._cumulative_states())
        restore(tree, self.state, self.parts)
        self._batches.forget()  # they were prefetched for the old order of the data
        if self.state.step < target:  # only an older state was left: replay the steps up to the target
            self.tracker.note(f"rollback: steps {self.state.step + 1} to {target} are run again to reach that state")
        self.replaying = replaying
        if self.state.step >= target:
            self.finish_replay()

    def note_halt(self, step: int, reason: str, *, machine: bool) -> None:
        """Logs that the guard gave up after a step.

        With `guard.escalate=whatif` the event says so, and holds the counts that the run goes on with.

        Args:
            machine: whether memory or arithmetic was at fault. Other settings would not help, so none are tried.
        """
        fields: dict[str, Any] = {"reason": reason, "tick": self.state.executed_steps}
        if self._guard.escalate == "whatif" and not machine:
            fields |= {"escalate": "whatif", "counts": self._cumulative_states()}
        if self._guard.since is not None:
            fields["since"] = self._guard.since
        self._tracker.event("halt", step, **fields)

    @property
    def replay_is_due(self) -> bool:
        """Whether a replay has reached its state, which is still to be evaluated and saved."""
        return self.replaying is not None and not self.replaying.used and self.state.step >= self.replaying.step

    def finish_replay_at(self, step: int) -> None:
        """Finishes a replay that has reached its state; `step` is the number of steps done."""
        if self.replaying is not None and step >= self.replaying.step:
            self.finish_replay()

    def finish_replay(self) -> None:
        """Restores the values that a rollback does not undo, and saves the state. Does nothing without a replay."""
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
        if done.keeps_later:
            return
        self.tracker.mark(self.state.step, done.executed_steps)
        self.checkpoints.rewind(self.state.step)
        self._resumption.went_back(self.state.step)
        self.save(val_loss_of(asdict(self._history), self.state.step), healthy=True)

    def abort_replay(self) -> None:
        """Ends a replay early. The checkpoints on disk are enough to repeat the replay in a resumed run."""
        self.replaying = None

    def _announce(
        self,
        trouble: int,
        target: int,
        loaded: int,
        detour: Detour,
        skipped: tuple[int, int],
    ) -> None:
        """Logs the rollback, and shows and sends it to the user."""
        tracker, reason = self.tracker, self._guard.reason
        tracker.event(
            "rollback",
            trouble,
            to=target,
            loaded=loaded,
            tick=self.state.executed_steps,
            skipped=[*skipped],
            lr_factor=detour.lr_factor,
            reason=reason,
        )
        slower = f", learning rate x {detour.lr_factor:g} until step {detour.until}" if detour.lr_factor < 1 else ""
        text = (
            f"step {trouble}: {reason}: rollback {detour.number}, to step {target}; batches {skipped[0]} to "
            f"{skipped[1] - 1} are never read again{slower}"
        )
        tracker.note(text)
        tracker.alert("rollback", text)

    def _cumulative_states(self) -> dict[str, dict[str, Any]]:
        parts = self.parts.items()
        return {name: part.cumulative_state() for name, part in parts if isinstance(part, HasCumulativeState)}

    def _wanted(self) -> int | None:
        """Returns the step of the state to restore: the newest healthy one, or one from before a slow spike."""
        before = self._guard.rollback_before
        if before is None:
            return self._retained.target
        if kept := [step for step in self._retained.steps if step <= before]:
            return max(kept)
        if (pinned := self._retained.pinned) is not None:
            return pinned
        saved = self.checkpoints.newest(healthy_only=True, at_most=before)
        return min(self._retained.steps, default=None) if saved is None else saved.step

    def _find(self, target: int) -> tuple[Tree, int] | None:
        """Returns a state to restore, and the step up to which to replay from it.

        The state is the newest one of at most `target` steps, from memory or disk; else the oldest healthy one.
        """
        kept = self._newest_intact(target)
        if kept is not None and kept["step"] == target:
            return kept, target
        trees: list[Tree] = []
        while (saved := self.checkpoints.newest(at_most=target) or self.checkpoints.oldest()) is not None:
            if kept is not None and kept["step"] >= saved.step:
                return kept, target
            fault = ""
            try:
                trees = [self._load(saved)]
            except UnusableCheckpoint as error:
                fault = str(error)
            if self.checkpoints.accept(saved, fault):
                break
        if saved is None:
            return None if kept is None else (kept, target)
        tree = self._resumption.fit(saved, trees[0])
        # Steps from before a resume that changed settings would not be the same steps again, so they are not replayed:
        # the run goes on from the checkpoint itself. It is older than a healthy state, so it is healthy as well.
        return tree, max(target, saved.step) if self._resumption.replayable(saved, target) else saved.step

    def _newest_intact(self, target: int) -> Tree | None:
        """Returns the newest snapshot of at most `target` steps that is finite and has its checksums; or None."""
        while (kept := self.snapshots.newest(target)) is not None:
            step, skipped, executed = self.state.step, self.state.skipped, self.state.executed_steps
            restore(kept, self.state, {})  # over a state that is given up in any case
            intact = self._guard.state_check.restored(self.state, self._references.get(kept["step"]))
            intact = intact and state_is_finite(self.state.model, self.state.optimizer)
            self.state.step, self.state.skipped, self.state.executed_steps = step, skipped, executed
            if not self._any_rank(not intact):
                return kept
            self.snapshots.drop(kept["step"])
            self.tracker.event("corrupt_snapshot", step, snapshot=kept["step"])
            self.tracker.note(f"step {step}: the snapshot after step {kept['step']} is damaged: not used")
        return None


def val_loss_of(history: Mapping[str, Any], step: int) -> float | None:
    """Returns the validation loss of the state after `step` steps; None if that state was not evaluated."""
    return history["val"].get("val/loss") if history.get("val_step") == step else None
