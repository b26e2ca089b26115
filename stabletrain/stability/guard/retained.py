"""Retained states: the step numbers of the states that a rollback may restore, and which of them are healthy.

The states themselves are in memory and on disk (`trainer/rollback.py`). A checkpoint stores only the step numbers of
the retained states. A resumed run retains the same states, and recomputes those that were only in memory.
"""

from dataclasses import dataclass, field


class NoRetainedStates:
    """Retains no states: this guard never rolls back."""

    def due(self, step: int) -> bool:
        """Returns False: this guard takes no snapshots."""
        del step
        return False

    def retain(self, step: int, healthy: bool) -> None:
        """Does nothing."""

    def forget(self) -> None:
        """Does nothing."""

    def pin(self, step: int) -> None:
        """Does nothing."""

    pinned: int | None = None
    """Step of the state that no rollback may go back beyond: none."""

    @property
    def steps(self) -> list[int]:
        """Steps of all retained states, oldest first: none."""
        return []

    @property
    def target(self) -> int | None:
        """Step of the state that a rollback restores: None."""
        return None


@dataclass
class RetainedStates(NoRetainedStates):
    """The newest healthy states, and newer states not yet known to be healthy.

    Attributes:
        most: maximum number of healthy states.
        every: steps between two snapshots.
        healthy_after: steps after which a state becomes healthy, if `trouble` is 0 then.
        waiting: steps of the states not yet known to be healthy, oldest first.
        known: steps of the healthy states, oldest first.
        pinned: step of the state from which a resume went on with other settings. No rollback goes back beyond it until
            the run has been healthy with them: what was trained before would be lost to a setting.
    """

    most: int
    every: int
    healthy_after: int
    waiting: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    pinned: int | None = None

    def due(self, step: int) -> bool:
        """Whether to take a snapshot after `step` steps: every `every` steps, and before the first step."""
        return not self.known or step % self.every == 0

    def retain(self, step: int, healthy: bool) -> None:
        """Adds the state after `step` steps if the run is healthy. The first state always counts as healthy."""
        if step not in self.steps and (healthy or not self.known):
            (self.waiting if self.known else self.known).append(step)

    def forget(self) -> None:
        """Forgets all states: they belong to another run folder and cannot be restored in this one."""
        self.waiting, self.known, self.pinned = [], [], None

    def pin(self, step: int) -> None:
        """Retains the state after `step` steps alone, and lets no rollback go back beyond it."""
        self.waiting, self.known, self.pinned = [], [step], step

    def promote(self, step: int) -> list[int]:
        """Marks as healthy the states taken at least `healthy_after` steps before `step`; returns their steps."""
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
        """Step of the newest healthy state, which a rollback restores; None if there is none."""
        return self.known[-1] if self.known else None

    def state_dict(self) -> dict[str, list[int]]:
        """Step numbers, for the checkpoint; part of the guard's state."""
        pinned = [] if self.pinned is None else [self.pinned]
        return {"waiting": list(self.waiting), "known": list(self.known), "pinned": pinned}

    def load_state_dict(self, state: dict) -> None:
        """Restores the step numbers. A checkpoint of another kind of guard has none."""
        self.waiting, self.known = list(state.get("waiting", [])), list(state.get("known", []))
        self.pinned = next(iter(state.get("pinned", [])), None)
