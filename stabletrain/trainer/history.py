"""What a run remembers of itself: its best evaluation, the time and data spent, its throughput."""

import math
import time
from dataclasses import asdict, dataclass, field

from stabletrain.records import Batch

UNITS = {"tok": "tokens", "img": "images", "sample": "samples"}
"""Units of throughput: as shown on the terminal, and as named in the metrics."""


@dataclass
class History:
    """What a run remembers of itself across interruptions.

    Attributes:
        best_loss: lowest validation loss so far, nats; at `best_step`.
        val: the newest evaluation's metrics, after `val_step` steps.
        updates: optimizer steps that are in the weights.
        seconds: training time, without evaluations and checkpoints.
        units: tokens or images consumed.
        lost_steps, lost_seconds: how much of it was rolled back.
    """

    best_loss: float = math.inf
    best_step: int = 0
    val: dict[str, float] = field(default_factory=dict)
    val_step: int = 0
    updates: int = 0
    seconds: float = 0.0
    units: int = 0
    lost_steps: int = 0
    lost_seconds: float = 0.0

    def cumulative_state(self) -> dict:
        """What a rollback does not undo: time and data spent."""
        names = ("seconds", "units", "lost_steps", "lost_seconds")
        return {name: getattr(self, name) for name in names}

    def load_cumulative_state(self, state: dict) -> None:
        """Puts that back over a restored history. The time since the restored state counts as lost."""
        lost = state["seconds"] - self.seconds
        self.load_state_dict({**state, "lost_seconds": state["lost_seconds"] + lost})

    def state_dict(self) -> dict:
        """For the checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        """From a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


class Throughput:
    """Tokens or images a second of training; evaluations and checkpoints do not count.

    Attributes:
        rate: units a second over the last stretch.
    """

    def __init__(self, history: History, ranks: int = 1) -> None:
        self.rate = 0.0
        self._ranks = ranks
        self._history = history
        self._since, self._units = time.perf_counter(), 0

    def count(self, batch: Batch) -> None:
        """Counts a batch, and the other ranks' parts: one unit a target, so tokens for text and images for classes."""
        self._units += batch.targets.numel() * self._ranks

    def measure(self) -> None:
        """Ends a stretch, adds it to the history, and begins the next."""
        now = time.perf_counter()
        seconds = now - self._since
        self.rate = self._units / seconds if seconds > 0 else 0.0
        self._history.seconds += seconds
        self._history.units += self._units
        self._since, self._units = now, 0

    def resume(self) -> None:
        """Begins a stretch now: the time since the last one was not spent on training."""
        self._since = time.perf_counter()
