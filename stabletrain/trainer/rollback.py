"""Goes back to an earlier state: rolls back, or replaces a state that memory or arithmetic has damaged.

A rollback restores the newest healthy state, and the run then skips the data that it has read since. If memory or
arithmetic failed, `put_back` restores the state after a step that is known to be good, and nothing is skipped. If
neither memory nor disk has the state, an older one is loaded, and the steps in between are replayed without logging. A
step is a pure function of state and step number, so the replay gives the same bits: a run that was killed and resumed
rolls back exactly as one that was never interrupted, and a state that was put back equals the one that was lost.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from stabletrain.data.batches import Prefetch
from stabletrain.data.order import position
from stabletrain.errors import TrainingHalted
from stabletrain.guard.policy import NoGuard
from stabletrain.records import RollbackPlan
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.history import History
from stabletrain.trainer.saved_states import SavedStates


@dataclass(frozen=True)
class PendingReplay:
    """What to do once a replay has reached the state to go back to.

    Attributes:
        step: number of steps of that state.
        trouble: the step after which the guard asked for the rollback.
        executed_steps, skipped, cumulative: values that a rollback does not undo.
        keeps_later: whether later logs and checkpoints remain, because the run reaches the same states again.
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
    """Goes back to one of the run's saved states.

    Attributes:
        saved: the saved states.
        replaying: set while steps are replayed to reach the state to go back to.

    Args:
        history: what the run records about itself.
        guard: asks for rollbacks, and plans them.
        batches: prefetched batches, which a rollback invalidates.
        tracker: receives events and messages.
    """

    def __init__(
        self, saved: SavedStates, *, history: History, guard: NoGuard, batches: Prefetch, tracker: NoTracker
    ) -> None:
        self.saved = saved
        self.replaying: PendingReplay | None = None
        self._state, self._history, self._guard = saved.state, history, guard
        self._batches, self._tracker = batches, tracker

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
        state = self._state
        # Counts and skipped data keep their present values, in the replay too: the lost state was reached with them.
        skipped, executed, cumulative = state.skipped, state.executed_steps, self.saved.cumulative_states()
        if (pending := self.replaying) is not None:  # the fault was in a replay, which starts from the beginning
            step, skipped, executed, used = pending.step, pending.skipped, pending.executed_steps, pending.used
            cumulative = {**pending.cumulative, "guard": cumulative["guard"]}
            self.replaying = None
        reason, tracker = self._guard.reason, self._tracker
        found = self.saved.find(step)
        if found is None:
            self._halt(trouble, f"{reason}; no intact state is left to go back to", machine=True)
        tree, target = found
        loaded = tree["step"]
        tracker.event("restore", trouble, to=target, loaded=loaded, tick=executed, reason=reason)
        text = f"step {trouble}: {reason}: the state after step {target} is put back"
        text += f", from step {loaded}" if loaded < target else ""
        tracker.note(f"{text}; no data are skipped")
        tracker.alert("state put back", text)
        # The replay must read the same data, at the learning rate that an earlier rollback has lowered.
        self.saved.restore(tree, {"guard": cumulative["guard"]})
        state.skipped = skipped
        self._guard.reason = reason
        self._batches.forget()
        self._replay(PendingReplay(target, trouble, executed, skipped, cumulative, target == step, used))

    def roll_back(self, trouble: int) -> None:
        """Restores the newest healthy state that the guard wants, and skips the data that was read since.

        Args:
            trouble: the step after which the guard gave up on the present state.

        Raises:
            TrainingHalted: no healthy state is left.
        """
        # On a machine that is not deterministic, trouble may come in the middle of a replay. End that replay first.
        self.finish_replay()
        state, reason = self._state, self._guard.reason
        wanted = self.saved.before_trouble()
        found = None if wanted is None else self.saved.find(wanted)
        # Never go back past a resume with other settings: a bad setting must not undo the training before it.
        pinned = self._guard.states.pinned
        if found is not None and pinned is not None and found[1] < pinned:
            found = None
            reason += f"; the state of step {pinned}, from which the run was resumed with other settings, is damaged"
        if found is None:
            self._halt(trouble, f"{reason}; no healthy state is left to go back to", machine=False)
        tree, target = found
        # Reading the same batches again would lead to the same weights again, bit for bit. So skip everything between
        # the restored state and the trouble, as PaLM did. `start` and `stop` are data positions, not step numbers.
        start, stop = position(target, state.skipped), position(trouble - 1, state.skipped) + 1
        plan = self._guard.begin_rollback(trouble, target)
        stop += plan.skip_batches
        self._announce(trouble, target, tree["step"], plan, (start, stop))
        # Counts, budgets and skipped data must survive the restore: keep them until the target state is reached.
        skipped, cumulative = [*state.skipped, (start, stop)], self.saved.cumulative_states()
        pending = PendingReplay(target, trouble, state.executed_steps, skipped, cumulative)
        self.saved.restore(tree, {})
        self._batches.forget()  # they were prefetched for the old order of the data
        if state.step < target:
            self._tracker.note(f"rollback: steps {state.step + 1} to {target} are run again to reach that state")
        self._replay(pending)

    def note_halt(self, step: int, reason: str, *, machine: bool) -> None:
        """Logs that the guard gave up after a step.

        With `guard.escalate=whatif` the event says so, and holds the counts with which the run continues after it.

        Args:
            machine: whether memory or arithmetic was at fault. Other settings would not help, so none are tried.
        """
        fields: dict[str, Any] = {"reason": reason, "tick": self._state.executed_steps}
        if self._guard.escalate == "whatif" and not machine:
            fields |= {"escalate": "whatif", "counts": self.saved.cumulative_states()}
        if self._guard.since is not None:
            fields["since"] = self._guard.since
        self._tracker.event("halt", step, **fields)

    def _halt(self, step: int, reason: str, *, machine: bool) -> NoReturn:
        self.note_halt(step, reason, machine=machine)
        raise TrainingHalted(f"step {step}: {reason}")

    def _announce(self, trouble: int, target: int, loaded: int, plan: RollbackPlan, skipped: tuple[int, int]) -> None:
        """Logs the rollback, and shows and sends it to the user."""
        tracker, reason = self._tracker, self._guard.reason
        tracker.event(
            "rollback",
            trouble,
            to=target,
            loaded=loaded,
            tick=self._state.executed_steps,
            skipped=[*skipped],
            lr_factor=plan.lr_factor,
            reason=reason,
        )
        slower = f", learning rate x {plan.lr_factor:g} until step {plan.until}" if plan.lr_factor < 1 else ""
        text = (
            f"step {trouble}: {reason}: rollback {plan.number}, to step {target}; batches {skipped[0]} to "
            f"{skipped[1] - 1} are never read again{slower}"
        )
        tracker.note(text)
        tracker.alert("rollback", text)

    # ---- replaying the steps from an older state up to the wanted one

    def _replay(self, pending: PendingReplay) -> None:
        """Starts a replay; finishes it at once if the restored state is the wanted one."""
        self.replaying = pending
        self.finish_replay_at(self._state.step)

    @property
    def reached_unused_state(self) -> bool:
        """Whether a replay has reached its state, and that state is still to be evaluated and saved."""
        return self.replaying is not None and not self.replaying.used and self._state.step >= self.replaying.step

    def finish_replay_at(self, step: int) -> None:
        """Finishes a replay that has reached its state; `step` is the number of steps done."""
        if self.replaying is not None and step >= self.replaying.step:
            self.finish_replay()

    def finish_replay(self) -> None:
        """Restores the values that a rollback does not undo, and saves the state. Does nothing without a replay."""
        done, state = self.replaying, self._state
        if done is None:
            return
        self.replaying = None
        state.executed_steps, state.skipped = done.executed_steps, done.skipped
        self.saved.load_cumulative_states(done.cumulative)
        self._history.lost_steps += done.trouble - state.step
        # The replay prefetched batches and took snapshots as the run did when it first reached this state.
        self._batches.forget()
        self.saved.retain()
        if done.keeps_later:
            return
        # From here on the run reads other data: mark the later log lines, and delete the later checkpoints.
        self._tracker.mark(state.step, done.executed_steps)
        self.saved.discard_later()
        self.saved.save(self._history.val_loss_at(state.step), healthy=True)
