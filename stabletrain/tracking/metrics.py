"""Metrics and events as lines of JSON: the record that is always there, whatever else is switched off.

`metrics.jsonl` has an object for each logged step, `events.jsonl` one for each thing that happened. NaN and infinities
are written as the strings "NaN", "Infinity", "-Infinity": never hidden, and every line is valid JSON to any reader.
A line reaches the file in one write, so a killed process tears at most the last one, and that is mended when the files
are next opened.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How a float that JSON does not know is written."""


class Metrics:
    """Appends to `metrics.jsonl` and `events.jsonl` of a run folder; may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        """Opens both files, making the folder if need be; a torn last line, left by a killed process, is dropped."""
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics, self._events = Lines(folder / "metrics.jsonl"), Lines(folder / "events.jsonl")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One line: `step`, `time` (seconds since 1970) and the values, floats in full precision."""
        self._metrics.append({"step": step, "time": round(time.time(), 3), **values})

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """One line: `event`, `step`, `time` (ISO 8601, UTC) and the fields."""
        self._events.append({"event": kind, "step": step, "time": now(), **fields})

    def started(self) -> bool:
        """Whether `metrics.jsonl` holds a line."""
        return self._metrics.path.exists() and self._metrics.path.stat().st_size > 0

    def rewind(self, step: int) -> None:
        """Drops the metrics of steps after `step`, at once or not at all; events stay, for they did happen.

        A run that continues after `step` steps writes those lines again, so that its file ends as that of a run which
        was never interrupted.
        """
        self._metrics.rewrite([line for line in read_jsonl(self._metrics.path) if not line.get("step", 0) > step])

    def close(self) -> None:
        """Closes both files; a later `log` raises."""
        self._metrics.close()
        self._events.close()


class Lines:
    """A file of JSON lines that is only ever whole: each line is one write, and a failed write is taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._warned = False
        self._open()

    def append(self, fields: Mapping[str, Any]) -> None:
        """Writes one line. A full disk costs the line and one warning, not the run."""
        line = (json.dumps(plain(fields), allow_nan=False) + "\n").encode()
        with self._lock:
            before = os.fstat(self._file).st_size
            try:
                if os.write(self._file, line) != len(line):
                    raise OSError("only part of a line was written")
            except OSError as error:
                os.ftruncate(self._file, before)
                if not self._warned:
                    self._warned = True
                    print(
                        f"stabletrain: {self.path} lacks lines from here on ({error}): training goes on",
                        file=sys.stderr,
                    )

    def rewrite(self, lines: list[dict[str, Any]]) -> None:
        """Replaces the content by these lines in one rename."""
        with self._lock:
            replace(self.path, "".join(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines))
            os.close(self._file)
            self._open()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(self._file).st_size
        end, block = size, 1 << 16
        while end > 0:  # back to the last newline
            start = max(end - block, 0)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of either kind, with NaN and infinities as floats; what is torn or no object is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(numbers(line))
    return lines


def plain(value: Any) -> Any:
    """The same as strict JSON knows it: non-finite floats as words, scalars of numpy and torch as numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)


def numbers(value: Any) -> Any:
    """The inverse of `plain` for floats."""
    if isinstance(value, dict):
        return {key: numbers(child) for key, child in value.items()}
    if isinstance(value, list):
        return [numbers(child) for child in value]
    return WORDS.get(value, value) if isinstance(value, str) else value


def replace(path: Path, text: str) -> None:
    """Gives a file new content in one rename, after it has reached the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def now() -> str:
    """The time, ISO 8601 in UTC, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
