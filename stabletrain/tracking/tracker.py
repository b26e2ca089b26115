"""The one thing the loop talks to: it passes on what happens to the files, to W&B and to the person watching."""

from collections.abc import Mapping
from typing import Any

from stabletrain.tracking.metrics import Metrics
from stabletrain.tracking.progress import Progress
from stabletrain.tracking.wandb import NoWandb, Wandb


class NoTracker:
    """Tells nobody: what every rank but the first has."""

    def start(self, total: int, first: int) -> None:
        """Begins to show how far the run is: `first` steps done of `total`."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the metrics of a step, under the names of the config groups: `train/loss`, `grad/norm`, `lr` ..."""

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """Records that something happened: skip, spike, rollback, checkpoint, resume, preempt, alarm, halt."""

    def note(self, text: str) -> None:
        """Shows a line to the person watching."""

    def alert(self, title: str, text: str) -> None:
        """Reaches a person who is not watching."""

    def progress(self, step: int, metrics: Mapping[str, Any], rate: float, unit: str, skipped: int) -> None:
        """Shows how far the run is; arguments as `Progress.update`."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Sets what stands in the run's line of a table: the final values, and what is known of them before."""

    def started(self) -> bool:
        """Whether there is a record already."""
        return False

    def rewind(self, tick: int) -> None:
        """Forgets the metrics after `tick` executed steps, which will be measured again."""

    def mark(self, step: int, tick: int) -> None:
        """Marks the metrics after `step`, up to `tick` executed steps, as rolled back."""

    def close(self, exit_code: int) -> None:
        """Ends the record; 0 is a run that finished."""


class Tracker(NoTracker):
    """Files, W&B and a progress line, in that order: what is seen has been written.

    The parts are started by whoever builds them; `close` ends them all.
    """

    def __init__(self, metrics: Metrics, wandb: Wandb | NoWandb, progress: Progress) -> None:
        self._metrics, self._wandb, self._progress = metrics, wandb, progress

    def start(self, total: int, first: int) -> None:
        self._progress.start(total, first)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._metrics.log(step, metrics)
        self._wandb.log(step, metrics)

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        self._metrics.event(kind, step, **fields)
        self._wandb.event(kind, step, **fields)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def alert(self, title: str, text: str) -> None:
        self._wandb.alert(title, text)

    def progress(self, step: int, metrics: Mapping[str, Any], rate: float, unit: str, skipped: int) -> None:
        self._progress.update(step, metrics, rate, unit, skipped)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._wandb.summary(values)

    def started(self) -> bool:
        return self._metrics.started()

    def rewind(self, tick: int) -> None:
        self._metrics.rewind(tick)

    def mark(self, step: int, tick: int) -> None:
        self._metrics.mark(step, tick)

    def close(self, exit_code: int) -> None:
        self._progress.close()
        self._wandb.finish(exit_code)
        self._metrics.close()
