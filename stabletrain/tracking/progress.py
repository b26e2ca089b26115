"""The progress of a run: one live line on a terminal, plain lines with the same content anywhere else.

    step  300/1500 ━━━━━━╸━━━━━━━━━ loss 2.31  grad 0.84  lr 2.9e-03  27.4k tok/s  skipped 0  1:32 left

If the line does not fit, its least important parts are dropped first (`DROPPED_FIRST`). `rich.progress` wraps or crops
columns instead, so only rich's `Live` is used. In a sweep, the output of a run goes to `output.txt` in its folder, and
only its live line goes to the terminal.
"""

import io
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stabletrain.printable import printable, say
from stabletrain.tracking.columns import thousands

SMALLEST_BAR, LARGEST_BAR = 8, 40
"""Smallest and largest width of the bar, in columns."""

DROPPED_FIRST = ("quiet", "lr", "rate", "grad", "left", "skipped")
"""Parts of the line in the order in which they are dropped; `quiet` is a skipped count of 0. Step and loss stay."""

REFRESH = 0.1
"""Minimum seconds between two redraws of the live line."""

EVALUATION_LINES = 30.0
"""Seconds between two plain lines about an evaluation; a shorter evaluation prints none."""


class Progress:
    """Shows progress as one live line, or as a plain line every `log_every` steps."""

    def __init__(self, log_every: int, stream: Any = None, label: str = "") -> None:
        """Uses a live line if `stream` (default: standard output) is a terminal that can move its cursor.

        A line with a `label` in front belongs to one run of several, and is erased at the end.
        """
        self.log_every = log_every
        self._stream = stream or sys.stdout
        self._label = label
        self._live: Any = None
        self._newest: tuple[Mapping[str, Any], float, str, int] | None = None
        self._evaluation: tuple[int, int] | None = None
        self._first = self._step = self._total = 0
        self._started = self._drawn = self._evaluation_began = self._printed = time.monotonic()

    @property
    def can_redraw(self) -> bool:
        """Whether the stream is a terminal that can move its cursor."""
        return self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")

    def start(self, total: int, first: int) -> None:
        """Starts with `first` of `total` steps done; a resumed run starts above 0."""
        self._total, self._first, self._step = total, first, first
        self._started = time.monotonic()
        if self.can_redraw:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, highlight=False)
            self._live = Live(
                console=console, auto_refresh=False, get_renderable=self._render, transient=bool(self._label)
            )
            self._live.start()

    def update(self, step: int, metrics: Mapping[str, Any], rate: float, unit: str, skipped: int) -> None:
        """Shows a step: its `train/loss`, `grad/norm` and `lr`, and the number of skipped steps so far.

        Args:
            step: steps done.
            rate: samples or tokens per second.
            unit: unit of `rate`, `tok` or `img`.
        """
        self._step, self._newest = step, (metrics, rate, unit, skipped)
        if self._live is None:
            if step % self.log_every == 0 or step == self._total:
                self._print("  ".join(self._parts().values()))
        elif time.monotonic() - self._drawn >= REFRESH or step == self._total:
            self._drawn = time.monotonic()
            self._live.refresh()

    def evaluating(self, done: int, total: int) -> None:
        """Shows an evaluation in place of the step, `done` of `total` batches; at the end, the step again."""
        now = time.monotonic()
        if done == 0:
            self._evaluation_began = self._printed = now
        self._evaluation = (done, total) if done < total else None
        if self._live is not None:
            if now - self._drawn >= REFRESH or self._evaluation is None:
                self._drawn = now
                self._live.refresh()
        elif self._evaluation and now - self._printed >= EVALUATION_LINES:
            self._printed = now
            self._print("  ".join(self._evaluation_parts().values()))

    def _evaluation_parts(self) -> dict[str, str]:
        done, total = self._evaluation or (0, 0)
        words = {"step": f"step {self._step}/{self._total}", "evaluating": f"evaluating {done}/{total}"}
        if done:
            seconds = (time.monotonic() - self._evaluation_began) / done * (total - done)
            words["left"] = f"{elapsed(seconds)} left"
        return words

    def note(self, text: str) -> None:
        """Prints a separate line, above the live one."""
        if self._live is None:
            self._print(text)
        else:
            self._live.console.print(printable(text), markup=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the live line; may be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a closed pipe (`| head`) must not stop training
            say(text, file=self._stream, flush=True)

    def _seconds_left(self) -> float | None:
        done = self._step - self._first
        return (time.monotonic() - self._started) / done * (self._total - self._step) if done > 0 else None

    def _parts(self) -> dict[str, str]:
        """Returns the parts of the newest step's line. Most steps are never drawn, so `update` does not format them."""
        if self._newest is None:
            return {}
        return parts(self._step, self._total, *self._newest, self._seconds_left())

    def _render(self) -> Any:
        from rich.text import Text

        if self._newest is None:
            return Text("")
        parts, (done, total) = self._parts(), (self._step, self._total)
        if self._evaluation is not None:
            parts, (done, total) = self._evaluation_parts(), self._evaluation
        words = fit({**parts, "step": self._label + parts["step"]}, self._live.console.width)
        bar = bar_of(done / max(total, 1), words.pop("bar"))
        head, *rest = words.items()
        text = Text(head[1] + " ", no_wrap=True, overflow="crop")
        text.append(bar[0], style="green").append(bar[1], style="bright_black").append(" ")
        return text.append("  ".join(word for _, word in rest))


def parts(
    step: int, total: int, metrics: Mapping[str, Any], rate: float, unit: str, skipped: int, left: float | None
) -> dict[str, str]:
    """Returns the parts of the line by name, in order, without those that are unknown."""
    words = {"step": f"step {step:>{len(str(total))}}/{total}"}
    if "train/loss" in metrics:
        words["loss"] = f"loss {short_number(metrics['train/loss'])}"
    if "grad/norm" in metrics:
        words["grad"] = f"grad {short_number(metrics['grad/norm'])}"
    if "lr" in metrics:
        words["lr"] = f"lr {metrics['lr']:.1e}"
    words["rate"] = f"{thousands(rate)} {unit}/s"
    words["skipped" if skipped else "quiet"] = f"skipped {skipped}"
    if left is not None:
        words["left"] = f"{elapsed(left)} left"
    return words


def fit(words: Mapping[str, str], width: int) -> dict[str, Any]:
    """Returns the parts that fit into `width` columns, and the width of the `bar` (0 if there is no room for it)."""
    kept = dict(words)
    for name in (None, *DROPPED_FIRST):
        kept.pop(name or "", None)
        room = width - len("  ".join(kept.values()))  # the bar replaces one separator: "step ━━━ loss"
        if room >= SMALLEST_BAR:
            break
    return {**kept, "bar": min(room, LARGEST_BAR) if room >= SMALLEST_BAR else 0}


def bar_of(share: float, columns: int) -> tuple[str, str]:
    """Returns the filled and the empty part of a bar, in half columns."""
    halves = round(min(max(share, 0.0), 1.0) * columns * 2)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return done, "━" * (columns - len(done))


def short_number(value: float) -> str:
    """Formats a number briefly: 2.31, 0.0042, 1234, 1.2e+05, nan."""
    size = abs(value)
    return f"{value:.2f}" if 0.1 <= size < 1000 else f"{value:.0f}" if 1000 <= size < 1e5 else f"{value:.2g}"


def elapsed(seconds: float) -> str:
    """Formats a duration: 1:32, 2:05:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class InSweep(Progress):
    """Shows a run of a sweep: plain lines in its `output.txt`, and a live line on the terminal."""

    def __init__(self, log_every: int, folder: Path, label: str, live: bool) -> None:
        """Opens neither file nor terminal. Only one run at a time may have a `live` line."""
        super().__init__(log_every, OutputFile(folder / "output.txt"))
        shown = Progress(log_every, label=label)
        self._shown = shown if live and shown.can_redraw else None

    def start(self, total: int, first: int) -> None:
        super().start(total, first)
        if self._shown is not None:
            self._shown.start(total, first)

    def update(self, step: int, metrics: Any, rate: float, unit: str, skipped: int) -> None:
        super().update(step, metrics, rate, unit, skipped)
        if self._shown is not None:
            self._shown.update(step, metrics, rate, unit, skipped)

    def evaluating(self, done: int, total: int) -> None:
        super().evaluating(done, total)
        if self._shown is not None:
            self._shown.evaluating(done, total)

    def close(self) -> None:
        super().close()
        if self._shown is not None:
            self._shown.close()


class OutputFile(io.TextIOBase):
    """A stream that appends to a text file and keeps it open only during a write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        """Appends text to the file."""
        with open(self._path, "a", encoding="utf-8") as file:
            return file.write(text)
