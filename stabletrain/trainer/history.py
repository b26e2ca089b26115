"""The history of a run: its best evaluation, the time and data spent, its throughput."""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from stabletrain.records import Batch

UNITS = {"tok": "tokens", "img": "images", "sample": "samples"}
"""Units of throughput: on the terminal, and in metric names."""

ENDS = 16
"""Number of training losses kept from the start of the run, and from its end."""


@dataclass
class History:
    """Results and costs of a run so far; saved in checkpoints.

    Attributes:
        best_loss: lowest validation loss so far, in nats, reached at `best_step`.
        val: metrics of the newest evaluation, after `val_step` steps.
        updates: updates in the current weights; rolled-back ones are not counted.
        seconds: training time, without evaluations and checkpoints.
        units: tokens, images or samples consumed.
        lost_steps, lost_seconds: steps and training time that were rolled back.
        val_losses: the losses of all evaluations, oldest first.
        first_losses, last_losses: training losses of the first and the last `ENDS` updates.
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
    val_losses: list[float] = field(default_factory=list)
    first_losses: list[float] = field(default_factory=list)
    last_losses: list[float] = field(default_factory=list)

    def count_update(self, loss: float) -> None:
        """Counts an update, with the loss of its step."""
        # New lists, because a saved state may hold the old ones.
        self.updates += 1
        if len(self.first_losses) < ENDS:
            self.first_losses = [*self.first_losses, loss]
        self.last_losses = [*self.last_losses, loss][-ENDS:]

    def val_loss_at(self, step: int) -> float | None:
        """Returns the validation loss of the state after `step` steps; None if that state was not evaluated."""
        return self.val.get("val/loss") if self.val_step == step else None

    def cumulative_state(self) -> dict:
        """Returns what a rollback does not undo: time and data spent."""
        return {name: getattr(self, name) for name in ("seconds", "units", "lost_steps", "lost_seconds")}

    def load_cumulative_state(self, state: dict) -> None:
        """Restores the cumulative part after a rollback. The time since the restored state counts as lost."""
        lost = state["seconds"] - self.seconds
        self._set({**state, "lost_seconds": state["lost_seconds"] + lost})

    def state_dict(self) -> dict:
        """Returns all fields, for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        """Restores all fields; those that the checkpoint of an older version lacks are reset."""
        self._set({**asdict(History()), **state})

    def _set(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, copy.copy(value))


class Throughput:
    """Measures tokens, images or samples per second of training, without evaluations and checkpoints.

    Attributes:
        rate: units per second over the last interval.
    """

    def __init__(self, history: History, ranks: int = 1) -> None:
        self.rate = 0.0
        self._ranks = ranks
        self._history = history
        self._since, self._units = time.perf_counter(), 0

    def count(self, batch: Batch) -> None:
        """Counts the tokens or samples of this step's batches on all ranks."""
        self._units += batch.units * self._ranks

    def measure(self) -> None:
        """Ends the interval, adds it to the history, and starts the next."""
        now = time.perf_counter()
        seconds = now - self._since
        self.rate = self._units / seconds if seconds > 0 else 0.0
        self._history.seconds += seconds
        self._history.units += self._units
        self._since, self._units = now, 0

    def resume(self) -> None:
        """Restarts the interval now, because the time since the last `measure` was not spent on training."""
        self._since = time.perf_counter()


@dataclass(frozen=True)
class HealingHistory:
    """How the run was healed so far; see `whatif/healing.py`.

    Attributes:
        resumed_steps: steps of the states that were resumed with another arm; retention keeps their checkpoints.
        healed_by: the arms that the run was resumed with.
        whatif_steps: steps spent on arms after all halts.
    """

    resumed_steps: Sequence[int] = ()
    healed_by: Sequence[str] = ()
    whatif_steps: int = 0
