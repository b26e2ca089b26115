"""What a guard reports, in either loop; and `LoopTracker`: where the guard of a loop of the user's own reports."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stabletrain.extension import Prediction
from stabletrain.monitors.rolling import Alarm
from stabletrain.parallel.ranks import Ranks
from stabletrain.printable import printable
from stabletrain.tracking.metrics import Lines, now
from stabletrain.tracking.tracker import NoTracker

LOG = logging.getLogger("stabletrain")
"""Lines are logged here, as warnings, on the main process."""


class LoopTracker(NoTracker):
    """Writes events and logs lines, on the main process.

    Args:
        folder: receives `events.jsonl` with the first event; None for no file.
        ranks: this process among those that train together.
        name: of the guard, before each line and in each event; empty for none.
    """

    def __init__(self, folder: Path | None, ranks: Ranks, name: str = "") -> None:
        self._folder, self._is_main, self._name = folder, ranks.is_main, name
        self._events: Lines | None = None

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """Writes one line, as in the run folder of `train.py`. A full disk loses lines, and does not end the loop."""
        if self._folder is None or not self._is_main:
            return
        if self._events is None:
            try:
                self._events = Lines(self._folder / "events.jsonl")
            except OSError as error:
                self._folder = None
                self.note(f"{error.filename}: events cannot be written ({error.strerror}); training is not affected")
                return
        guard = {"guard": self._name} if self._name else {}
        self._events.append({"event": kind, "step": step, "time": now(), **guard, **fields})

    def note(self, text: str) -> None:
        """Logs a line."""
        if self._is_main:
            LOG.warning("%s", printable(f"{self._name}: {text}" if self._name else text))


def log_alarms(tracker: NoTracker, step: int, alarms: Sequence[Alarm]) -> None:
    """Records each alarm as an event, prints it, and sends it as a W&B alert."""
    for alarm in alarms:
        since = {} if alarm.since is None else {"since": alarm.since}
        tracker.event("alarm", step, kind=alarm.kind, text=alarm.text, **since)
        tracker.note(f"step {step}: {alarm.text}")
        tracker.alert(alarm.kind, f"step {step}: {alarm.text}")


def log_predictions(tracker: NoTracker, step: int, predictions: Sequence[Prediction]) -> None:
    """Records each prediction of a forecast as an event, prints it, and sends it as a W&B alert."""
    for each in predictions:
        tracker.event("forecast", step, **each.fields())
        tracker.note(f"step {step:,}: {each.text}")
        tracker.alert("forecast", f"step {step:,}: {each.text}")
