"""Retained states: the step numbers of the states that a rollback may restore, and which of them are healthy.

The states themselves are in memory (`guard/states.py`) and on disk (`trainer/saved_states.py`). A checkpoint stores
only the step numbers of the retained states. A resumed run retains the same states, and recomputes those that were only
in memory.
"""

from dataclasses import dataclass, field


class NoRetainedStates:
    """Retains no states: this guard never rolls back."""

    def due(self, step: int) -> bool:
        """Returns False: this guard takes no snapshots."""
        return False

    def retain(self, step: int, healthy: bool) -> None:
        """Does nothing."""

    def forget(self) -> None:
        """Does nothing."""

    def pin(self, step: int) -> None:
        """Does nothing."""

    pinned: int | None = None
    """Step of the oldest state that a rollback may restore; None: there is no such bound."""

    @property
    def most_retained(self) -> int:
        """Largest number of states retained at the same time: 0."""
        return 0

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
        candidates: steps of the states not yet known to be healthy, oldest first.
        healthy: steps of the healthy states, oldest first.
        pinned: step of the state that was resumed with other settings. No rollback restores an older state until the
            run has been healthy with these settings: a bad setting must not undo what was trained before it.
    """

    most: int
    every: int
    healthy_after: int
    candidates: list[int] = field(default_factory=list)
    healthy: list[int] = field(default_factory=list)
    pinned: int | None = None

    def due(self, step: int) -> bool:
        """Whether to take a snapshot after `step` steps: every `every` steps, and before the first step."""
        return not self.healthy or step % self.every == 0

    def retain(self, step: int, healthy: bool) -> None:
        """Adds the state after `step` steps if the run is healthy. The first state always counts as healthy."""
        if step not in self.steps and (healthy or not self.healthy):
            (self.candidates if self.healthy else self.healthy).append(step)

    def forget(self) -> None:
        """Forgets all states: they belong to another run folder and cannot be restored in this one."""
        self.candidates, self.healthy, self.pinned = [], [], None

    def pin(self, step: int) -> None:
        """Retains only the state after `step` steps, and allows no rollback to an older one."""
        self.candidates, self.healthy, self.pinned = [], [step], step

    def promote(self, step: int) -> list[int]:
        """Marks as healthy the states taken at least `healthy_after` steps before `step`; returns their steps."""
        ready = [taken for taken in self.candidates if step - taken >= self.healthy_after]
        self.candidates = self.candidates[len(ready) :]
        self.healthy = (self.healthy + ready)[-self.most :]
        return ready

    @property
    def most_retained(self) -> int:
        """Largest number of states retained at the same time in a healthy run."""
        return self.most + max(1, -(-self.healthy_after // self.every))

    @property
    def steps(self) -> list[int]:
        """Steps of all retained states, oldest first."""
        return self.healthy + self.candidates

    @property
    def target(self) -> int | None:
        """Step of the newest healthy state, which a rollback restores; None if there is none."""
        return self.healthy[-1] if self.healthy else None

    def state_dict(self) -> dict[str, list[int]]:
        """Step numbers, for the checkpoint; part of the guard's state."""
        pinned = [] if self.pinned is None else [self.pinned]
        return {"waiting": list(self.candidates), "known": list(self.healthy), "pinned": pinned}

    def load_state_dict(self, state: dict) -> None:
        """Restores the step numbers. A checkpoint of another kind of guard has none."""
        self.candidates, self.healthy = list(state.get("waiting", [])), list(state.get("known", []))
        self.pinned = next(iter(state.get("pinned", [])), None)
