"""Retained states: which states a rollback may restore, and which of them are healthy, by their step numbers.

The states themselves are in memory and on disk (`trainer/rollback.py`). Only the step numbers are stored in
checkpoints, so a resumed run retains the same states: one that was lost with the process is computed again.
"""

from dataclasses import dataclass, field


class NoRetainedStates:
    """No state is retained: the guard never rolls back."""

    def due(self, step: int) -> bool:
        """Whether to take a snapshot of the state after `step` steps."""
        del step
        return False

    def retain(self, step: int, healthy: bool) -> None:
        """Adds the state after `step` steps, unless the run is in trouble (`healthy` is False)."""

    def forget(self) -> None:
        """Forgets all states: they belong to another run folder and cannot be restored here."""

    @property
    def steps(self) -> list[int]:
        """Steps of all retained states, oldest first."""
        return []

    @property
    def target(self) -> int | None:
        """Step of the newest healthy state, which a rollback restores; None without one."""
        return None


@dataclass
class RetainedStates(NoRetainedStates):
    """The newest healthy states, and those that are not known to be healthy yet.

    Attributes:
        most: healthy states that are retained.
        every: steps between two snapshots.
        healthy_after: a state becomes healthy so many steps later, if the run is out of trouble then.
        waiting: steps of the states that are not known to be healthy yet, oldest first.
        known: steps of the healthy states, oldest first.
    """

    most: int
    every: int
    healthy_after: int
    waiting: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)

    def due(self, step: int) -> bool:
        """Whether to take a snapshot: every `every` steps, and before the first step."""
        return not self.known or step % self.every == 0

    def retain(self, step: int, healthy: bool) -> None:
        """Adds the state after `step` steps, unless the run is in trouble. The first state counts as healthy."""
        if step not in self.steps and (healthy or not self.known):
            (self.waiting if self.known else self.known).append(step)

    def forget(self) -> None:
        """Forgets all states."""
        self.waiting, self.known = [], []

    def promote(self, step: int) -> list[int]:
        """Marks states as healthy that are at least `healthy_after` steps older than `step`; returns their steps."""
        ready = [taken for taken in self.waiting if step - taken >= self.healthy_after]
        self.waiting = self.waiting[len(ready) :]
        self.known = (self.known + ready)[-self.most :]
        return ready

    @property
    def steps(self) -> list[int]:
        """Steps of all retained states, oldest first."""
        return self.known + self.waiting

    @property
    def target(self) -> int | None:
        """Step of the newest healthy state; None without one."""
        return self.known[-1] if self.known else None

    def state_dict(self) -> dict[str, list[int]]:
        """For the checkpoint, as part of the guard's state."""
        return {"waiting": list(self.waiting), "known": list(self.known)}

    def load_state_dict(self, state: dict) -> None:
        """From a checkpoint; another kind of guard has stored no states."""
        self.waiting, self.known = list(state.get("waiting", [])), list(state.get("known", []))
