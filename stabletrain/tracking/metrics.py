"""Writes metrics and events as JSON lines. This record always exists, even if all other logging is off.

`metrics.jsonl` has one object per logged step, `events.jsonl` one per event. NaN and infinities are written as the
strings "NaN", "Infinity" and "-Infinity", so they are never hidden and every line is strict JSON. Each line is a single
write. A killed process leaves at most the last line incomplete, and the next process that opens the file removes it.
"""

import errno
import json
import math
import os
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.printable import say, warn
from stabletrain.stored.json_files import parse, read_words
from stabletrain.stored.run_files import is_line

NONFINITE_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The words for floats that JSON cannot represent, and their values."""


class Metrics:
    """Appends to `metrics.jsonl` and `events.jsonl` of a run folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Opens both files, creates the folder if necessary, and removes an incomplete last line.

        Raises:
            ConfigError: the files cannot be written.
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
        """Writes one line: `step`, `time` (seconds since 1970) and the values, with floats in full precision."""
        self._metrics.append({"step": step, "time": round(time.time(), 3), **values})

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        """Writes one line: `event`, `step`, `time` (ISO 8601, UTC) and the fields."""
        self._events.append({"event": kind, "step": step, "time": now(), **fields})

    def started(self) -> bool:
        """Returns whether `metrics.jsonl` contains a line."""
        return self._metrics.path.exists() and self._metrics.path.stat().st_size > 0

    def rewind(self, tick: int) -> None:
        """Removes the metrics after `tick` atomically, and keeps all events, because they did happen.

        A resumed run logs the removed steps again, so its file ends like that of a run without interruption.

        Args:
            tick: number of executed steps, including those that were rolled back. A line without a tick counts by its
                step.
        """
        kept = [line for line in read_jsonl(self._metrics.path) if not line.get("tick", line.get("step", 0)) > tick]
        self._metrics.rewrite(kept)

    def mark(self, step: int, tick: int) -> None:
        """Adds `rolled_back: true` to the metrics after `step`, up to `tick` executed steps.

        If that fails, for example on a full disk, the next call and `close` try again.
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
            warn(f"{self._metrics.path}: the lines after step {step} could not be marked as rolled back ({error})")

    def close(self) -> None:
        """Closes both files; a later `log` raises ValueError."""
        self._mark()
        self._metrics.close()
        self._events.close()


class Lines:
    """A file of complete JSON lines: each line is one write, and a failed write is undone.

    A full disk or a deleted file loses lines but never stops the run. A warning is printed when the first line is lost,
    and another one when writing succeeds again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file: int | None = None
        self._lost = 0  # lines lost since the last successful write
        self._open()

    def append(self, fields: Mapping[str, Any]) -> None:
        """Writes one line. If the write fails, the line is lost."""
        line = (json.dumps(plain(fields), allow_nan=False) + "\n").encode()
        with self._lock:
            if self._file is None:
                raise ValueError(f"{self.path} is closed")
            try:
                self._write(line)
            except OSError as error:
                self._lost += 1
                if self._lost == 1:
                    warn(f"{self.path} cannot be written ({error}): lines are lost from here on, training continues")
                return
            if self._lost:
                warn(f"{self.path} is written again; lost lines: {self._lost}")
                self._lost = 0

    def rewrite(self, lines: list[dict[str, Any]]) -> None:
        """Replaces the content of the file by these lines atomically."""
        with self._lock:
            replace(self.path, "".join(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines))
            self._open()

    def close(self) -> None:
        """Closes the file; a later `append` raises ValueError."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        if self._lost:  # removes an incomplete line, and finds a disk that was mounted again
            self._open()
        elif os.fstat(self._file).st_nlink == 0:
            self._open()
            warn(f"{self.path} was deleted: it is created again, without the earlier lines")
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("only part of a line was written")
        except OSError:
            os.ftruncate(self._file, before)  # no incomplete line may stay
            raise

    def _open(self) -> None:
        """Opens the file, replaces the open descriptor, and removes an incomplete last line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        # A pipe would block, and a link may lead anywhere.
        opened = os.open(self.path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise OSError(errno.EINVAL, "not a file", str(self.path))
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
    """Reads metrics or events, with NaN and infinities as floats. Ignores lines that are damaged."""
    lines = []
    for text in read_words(path).split("\n") if path.is_file() else []:
        with suppress(ValueError):
            if is_line(line := parse(text)):
                lines.append(numbers(line))
    return lines


def plain(value: Any) -> Any:
    """Converts a value to strict JSON: non-finite floats to words, scalars of numpy and torch to numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)


def print_json(value: Any) -> None:
    """Prints a value as strict JSON, as `--json` of a command does; `docs/reference/json.md` shows its shape."""
    say(json.dumps(plain(value), allow_nan=False, indent=2))


def numbers(value: Any) -> Any:
    """Converts the words for non-finite floats back to floats."""
    if isinstance(value, dict):
        return {key: numbers(child) for key, child in value.items()}
    if isinstance(value, list):
        return [numbers(child) for child in value]
    return NONFINITE_WORDS.get(value, value) if isinstance(value, str) else value


def replace(path: Path, text: str) -> None:
    """Replaces the content of a file atomically and durably. If that fails, the file is unchanged."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", encoding="utf-8") as file:  # never through a link, which may lead anywhere
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def now() -> str:
    """Returns the current time in UTC, in ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
