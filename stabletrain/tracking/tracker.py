"""The training loop's interface for logging: it forwards to the files, to W&B and to the progress line."""

from collections.abc import Mapping
from typing import Any

from stabletrain.tracking.metrics import Metrics
from stabletrain.tracking.progress import Progress
from stabletrain.tracking.wandb import NoWandb


class NoTracker:
    """Logs nothing: for all ranks except the main process. Base class, and what each tracker must offer."""

    def start(self, total: int, first: int) -> None:
        """Starts the progress line with `first` of `total` steps done."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the metrics of a step, such as `train/loss`, `grad/norm` and `lr`."""

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """Records an event: skip, spike, rollback, checkpoint, resume, preempt, alarm, incident, halt ..."""

    def note(self, text: str) -> None:
        """Prints a line on the terminal."""

    def alert(self, title: str, text: str) -> None:
        """Sends an alert through W&B."""

    def progress(self, step: int, metrics: Mapping[str, Any], rate: float, unit: str, skipped: int) -> None:
        """Updates the progress line; see `Progress.update`."""

    def evaluating(self, done: int, total: int) -> None:
        """Shows the progress of an evaluation, in batches."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Sets summary values of the run, such as its final metrics."""

    def started(self) -> bool:
        """Returns whether any metrics are recorded already."""
        return False

    def rewind(self, tick: int) -> None:
        """Removes the metrics after `tick` executed steps, which the run will execute again."""

    def mark(self, step: int, tick: int) -> None:
        """Marks the metrics after `step`, up to `tick` executed steps, as rolled back."""

    def close(self, exit_code: int) -> None:
        """Ends the record with the exit code of the run."""


class Tracker(NoTracker):
    """Logs to the files first, then to W&B. Also shows the progress line.

    The caller starts `metrics` and `wandb`; `close` ends all three.
    """

    def __init__(self, metrics: Metrics, wandb: NoWandb, progress: Progress) -> None:
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

    def evaluating(self, done: int, total: int) -> None:
        self._progress.evaluating(done, total)

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
