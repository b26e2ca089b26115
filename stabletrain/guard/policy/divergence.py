"""Divergence: a run that has lost half of what it had learnt, without any spike.

    level     mean loss of the last `window` applied steps
    learnt    the first losses minus the lowest level so far
    diverged  the level is above the lowest one by half of what was learnt, and by a fifth of the first losses

A run whose loss has only risen from the start has learnt nothing. It has diverged once its level is a fifth above the
first losses. Data of a new kind can have the same effect.
"""

from collections import deque
from typing import Any, NamedTuple

from stabletrain.monitors.change_point import median

FIRST_LOSSES = 8
"""Number of losses whose median is the first level."""

LOST_SHARE = 0.5
"""A run has diverged if it has lost this share of what it had learnt."""

MIN_RISE_SHARE = 0.2
"""The level must also rise by this share of the first level, more than the noise of a run that has learnt little."""


class Diverged(NamedTuple):
    """How a run has diverged.

    Attributes:
        text: one line about it.
        since: the step in the middle of the losses whose level was lowest: the rise begins about there.
    """

    text: str
    since: int


class NoDivergence:
    """Looks for no divergence."""

    def add(self, step: int, loss: float) -> Diverged | None:
        """Returns None."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores nothing."""


class Divergence(NoDivergence):
    """Looks for divergence.

    Args:
        window: number of losses in a level.
    """

    def __init__(self, window: int) -> None:
        self._first: list[float] = []
        self._losses: deque[float] = deque(maxlen=window)
        self._lowest: tuple[float, int] | None = None

    def add(self, step: int, loss: float) -> Diverged | None:
        """Adds the loss of an applied step, which is finite; returns whether the run has diverged, and how."""
        if len(self._first) < FIRST_LOSSES:
            self._first.append(loss)
        self._losses.append(loss)
        if len(self._losses) < (self._losses.maxlen or 0):
            return None
        level, first = sum(self._losses) / len(self._losses), median(self._first)
        lowest, lowest_step = self._lowest = self._lowest or (first, 1)
        if level <= lowest:
            self._lowest = (level, step)
        if level - lowest <= max(LOST_SHARE * (first - lowest), MIN_RISE_SHARE * abs(first)):
            return None
        since = max(lowest_step - len(self._losses) // 2, 1)
        text = (
            f"mean loss {level:.4g} in the last {len(self._losses)} updates, after {lowest:.4g} at step {lowest_step}"
        )
        return Diverged(f"the run has diverged: {text}", since)

    def state_dict(self) -> dict[str, Any]:
        """Losses and levels, for the checkpoint."""
        lowest, step = self._lowest or (0.0, 0)
        return {"first": list(self._first), "losses": list(self._losses), "lowest": lowest, "lowest_at": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them; a checkpoint of a run that did not look for divergence has none."""
        self._first = list(state.get("first", []))
        self._losses = deque(state.get("losses", []), maxlen=self._losses.maxlen)
        self._lowest = (state["lowest"], int(state["lowest_at"])) if state.get("lowest_at") else None
