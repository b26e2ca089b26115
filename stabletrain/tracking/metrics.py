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
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How a float that JSON does not know is written."""


class Metrics:
    """Appends to `metrics.jsonl` and `events.jsonl` of a run folder; may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        """Opens both files, making the folder if need be; a torn last line, left by a killed process, is dropped.

        Raises:
            ConfigError: they cannot be written.
        """
        try:
            self._metrics, self._events = Lines(folder / "metrics.jsonl"), Lines(folder / "events.jsonl")
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={folder}: its metrics cannot be written ({error}): fix that, or choose another "
                "hydra.run.dir"
            ) from error
        self._unmarked: list[tuple[int, int]] = []

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One line: `step`, `time` (seconds since 1970) and the values, floats in full precision."""
        self._metrics.append({"step": step, "time": round(time.time(), 3), **values})

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """One line: `event`, `step`, `time` (ISO 8601, UTC) and the fields."""
        self._events.append({"event": kind, "step": step, "time": now(), **fields})

    def started(self) -> bool:
        """Whether `metrics.jsonl` holds a line."""
        return self._metrics.path.exists() and self._metrics.path.stat().st_size > 0

    def rewind(self, tick: int) -> None:
        """Drops the metrics after `tick`, at once or not at all; events stay, for they did happen.

        A run that continues there writes those lines again, so that its file ends as that of a run which was never
        interrupted.

        Args:
            tick: steps executed, those that were rolled back included; a line without it has its step for one.
        """
        kept = [line for line in read_jsonl(self._metrics.path) if not line.get("tick", line.get("step", 0)) > tick]
        self._metrics.rewrite(kept)

    def mark(self, step: int, tick: int) -> None:
        """Marks the metrics after `step`, up to `tick`, `rolled_back: true`: they stay, but are not the run's course.

        What cannot be marked now, on a full disk, is tried again with the next mark and at the end.
        """
        self._unmarked.append((step, tick))
        self._mark()

    def _mark(self) -> None:
        if not self._unmarked:
            return
        lines = read_jsonl(self._metrics.path)
        for step, tick in self._unmarked:
            gone = [line.get("step", 0) > step and line.get("tick", tick) <= tick for line in lines]
            lines = [{**line, "rolled_back": True} if g else line for line, g in zip(lines, gone, strict=True)]
        try:
            self._metrics.rewrite(lines)
            self._unmarked.clear()
        except OSError as error:
            warn(f"{self._metrics.path}: its lines after step {step} are rolled back, but not marked so ({error})")

    def close(self) -> None:
        """Closes both files; a later `log` raises."""
        self._mark()
        self._metrics.close()
        self._events.close()


class Lines:
    """A file of JSON lines that is only ever whole: each line is one write, and a failed write is taken back.

    A disk that takes no more, and a file that is deleted meanwhile, cost lines and never the run. It is said once when
    lines are lost, and once when they are written again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file: int | None = None
        self._lost = 0  # lines, since the disk last took one
        self._open()

    def append(self, fields: Mapping[str, Any]) -> None:
        """Writes one line, or loses it."""
        line = (json.dumps(plain(fields), allow_nan=False) + "\n").encode()
        with self._lock:
            if self._file is None:
                raise ValueError(f"{self.path} is closed")
            try:
                self._write(line)
            except OSError as error:
                self._lost += 1
                if self._lost == 1:
                    warn(f"{self.path} lacks lines from here on ({error}): training goes on")
                return
            if self._lost:
                warn(f"{self.path} is written again; lines that are missing: {self._lost}")
                self._lost = 0

    def rewrite(self, lines: list[dict[str, Any]]) -> None:
        """Replaces the content by these lines in one rename."""
        with self._lock:
            replace(self.path, "".join(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines))
            self._open()

    def close(self) -> None:
        """Closes the file; a later `append` raises."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        if self._lost:  # what stands half-written is mended, and a disk that was mounted anew is found
            self._open()
        elif os.fstat(self._file).st_nlink == 0:
            self._open()
            warn(f"{self.path} had been deleted: it is made again, without the lines up to here")
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("only part of a line was written")
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def _open(self) -> None:
        """Opens the file, in place of the one that is open, and drops a torn last line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(opened).st_size
        end, block = size, 1 << 16
        while end > 0:  # back to the last newline
            start = max(end - block, 0)
            newline = os.pread(opened, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(opened, end)
        if self._file is not None:
            os.close(self._file)
        self._file = opened


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
    """Gives a file new content in one rename, after it has reached the disk; one that fails leaves nothing behind."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def warn(message: str) -> None:
    """One line for people, if there is still anybody to read it."""
    with suppress(OSError):
        print(f"stabletrain: {message}", file=sys.stderr)


def now() -> str:
    """The time, ISO 8601 in UTC, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
