"""What a run of a sweep shows: all that it would say by itself goes into `output.txt` of its folder, one live line to
the terminal.
"""

from pathlib import Path
from typing import Any

from stabletrain.tracking.progress import Progress


class InSweep(Progress):
    """A run's progress within a sweep."""

    def __init__(self, log_every: int, folder: Path, label: str, live: bool) -> None:
        """Nothing is opened before `start`.

        Args:
            log_every: steps between two plain lines in the file.
            folder: the run's.
            label: which run it is, before the live line.
            live: whether this run alone may use the terminal.
        """
        super().__init__(log_every, Page(folder / "output.txt"))
        shown = Progress(log_every, label=label)
        self._shown = shown if live and shown.moves else None

    def start(self, total: int, first: int) -> None:
        super().start(total, first)
        if self._shown is not None:
            self._shown.start(total, first)

    def update(self, step: int, metrics: Any, rate: float, unit: str, skipped: int) -> None:
        super().update(step, metrics, rate, unit, skipped)
        if self._shown is not None:
            self._shown.update(step, metrics, rate, unit, skipped)

    def close(self) -> None:
        super().close()
        if self._shown is not None:
            self._shown.close()


class Page:
    """A text file as a stream that is open only while it is written to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        """Adds text at the end."""
        with open(self._path, "a", encoding="utf-8") as file:
            return file.write(text)

    def flush(self) -> None:
        """Everything is written already."""

    def isatty(self) -> bool:
        """No terminal."""
        return False
