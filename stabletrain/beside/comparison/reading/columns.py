"""Reads `metrics.jsonl` as columns: for each metric, an array of steps and an array of values.

Lines with the same metric names become one float64 matrix, which needs far less memory than one dict per line. NaN and
infinities, which the file stores as words, become floats again.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from stabletrain.stored.run_files import is_line
from stabletrain.tracking.metrics import plain

BLOCK = 1 << 22
"""Bytes parsed at once, which bounds the memory that a long file needs."""

POINTS = 500
"""Default maximum number of points of a curve."""

Curve = tuple[np.ndarray, np.ndarray]
"""Steps (int64) and values (float64), of equal length."""


@dataclass
class Sheet:
    """All lines with the same metric names.

    Attributes:
        names: the metric names, in the order of the lines.
        rows: the line numbers in the file, int64 `[lines]`.
        values: float64 `[lines, names]`; NaN if a value is not a number.
    """

    names: tuple[str, ...]
    rows: np.ndarray
    values: np.ndarray

    def column(self, name: str) -> np.ndarray:
        """Returns the values of one metric, `[lines]`."""
        return self.values[:, self.names.index(name)]

    def where(self, chosen: np.ndarray) -> "Sheet":
        """Selects the lines for which `chosen`, bool `[lines]`, is true."""
        return Sheet(self.names, self.rows[chosen], self.values[chosen])


@dataclass
class Columns:
    """All lines of a file.

    Attributes:
        kept: the lines that no rollback discarded, grouped by their names.
        rolled_back: the lines that a rollback or a healing discarded, grouped by their names.
        lines: number of readable lines.
        unreadable: number of unreadable lines, not counting an unfinished last line.
    """

    kept: list[Sheet] = field(default_factory=list)
    rolled_back: list[Sheet] = field(default_factory=list)
    lines: int = 0
    unreadable: int = 0

    def curve(self, name: str) -> Curve:
        """Returns the kept values of a metric; empty if there are none."""
        return joined(self.kept, name)

    def abandoned(self, name: str) -> list[Curve]:
        """Returns the rolled-back values of a metric, a curve per rollback or healing, in the order of execution."""
        found = [sheet for sheet in self.rolled_back if name in sheet.names]
        attempts = np.unique(np.concatenate([attempt(sheet) for sheet in found])) if found else []
        return [joined([sheet.where(attempt(sheet) == number) for sheet in found], name) for number in attempts]


def joined(sheets: list[Sheet], name: str) -> Curve:
    """Joins the values of one metric from several sheets, in file order."""
    found = [sheet for sheet in sheets if name in sheet.names]
    if not found:
        return np.empty(0, np.int64), np.empty(0)
    steps = np.concatenate([sheet.column("step") for sheet in found]).astype(np.int64)
    values = np.concatenate([sheet.column(name) for sheet in found])
    by_row = np.argsort(np.concatenate([sheet.rows for sheet in found]), kind="stable")
    return steps[by_row], values[by_row]


def attempt(sheet: Sheet) -> np.ndarray:
    """Returns the number of rollbacks and healings before each line, `[lines]`."""
    counts = [sheet.column(name) for name in ("guard/rollbacks", "guard/healings") if name in sheet.names]
    return np.sum(counts, axis=0) if counts else np.zeros(len(sheet.rows))


def read_columns(file: Path) -> Columns:
    """Reads a `metrics.jsonl`. A file that does not exist has no lines.

    Ignores lines that are incomplete, are not JSON objects, or have no step.

    Raises:
        OSError: the file cannot be read.
    """
    found = Columns()
    parts: dict[tuple[str, ...], list[tuple[np.ndarray, np.ndarray]]] = {}
    for values, unreadable in blocks(file):
        lines = [line for line in values if is_line(line)]
        found.unreadable += unreadable + len(values) - len(lines)
        alike: dict[tuple[str, ...], list[int]] = {}  # rows by their metric names
        for row, names in enumerate(map(tuple, lines)):
            alike.setdefault(names, []).append(row)
        for names, rows in alike.items():
            numbers = matrix([lines[row] for row in rows], len(names))
            parts.setdefault(names, []).append((found.lines + np.array(rows, np.int64), numbers))
        found.lines += len(lines)
    for names, several in parts.items():
        sheet = Sheet(
            names,
            np.concatenate([rows for rows, _ in several]),
            np.concatenate([numbers for _, numbers in several]),
        )
        gone = sheet.column("rolled_back") == 1 if "rolled_back" in names else np.zeros(len(sheet.rows), bool)
        if not gone.all():
            found.kept.append(sheet.where(~gone) if gone.any() else sheet)
        if gone.any():
            found.rolled_back.append(sheet.where(gone))
    return found


def blocks(file: Path) -> Iterator[tuple[list[Any], int]]:
    """Yields the values of a file of JSON lines, block by block, with the number of invalid lines in each block.

    An unfinished last line, which the run may just be writing, does not count as invalid.
    """
    if not file.exists():
        return
    with open(file, "rb") as stream:
        rest = b""
        while block := stream.read(BLOCK):
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                yield parse(whole)
        if rest.strip():
            yield parse(rest)[0], 0


def parse(text: bytes) -> tuple[list[Any], int]:
    """Parses lines of JSON; returns their values and the number of invalid lines."""
    try:
        return orjson.loads(b"[" + text.replace(b"\n", b",") + b"]"), 0  # one call is faster than one per line
    except ValueError:
        pass
    values, unreadable = [], 0
    for line in text.split(b"\n"):
        if not line.strip():
            continue
        try:
            value = json.loads(line)  # also accepts a bare NaN and integers above 64 bits
            json.dumps(value, ensure_ascii=False).encode()  # raises if a text is no valid Unicode
            values.append(value)
        except (ValueError, RecursionError):
            unreadable += 1
    return values, unreadable


def matrix(lines: list[dict[str, Any]], names: int) -> np.ndarray:
    """Converts lines with the same names to float64 `[lines, names]`; values that are not numbers become NaN."""
    values = chain.from_iterable(map(dict.values, lines))
    try:
        numbers = np.fromiter(values, np.float64, len(lines) * names)  # faster than from a list of rows
    except (TypeError, ValueError, OverflowError):
        numbers = np.array([as_float(value) for line in lines for value in line.values()], np.float64)
    return numbers.reshape(len(lines), names)


def as_float(value: Any) -> float:
    """Converts a JSON value to a float; NaN if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def not_finite(curve: Curve) -> list[tuple[int, str]]:
    """Returns step and word (`NaN`, `Infinity`) where a curve stops being finite, or where the word changes."""
    steps, values = curve
    words = [None if math.isfinite(value) else str(plain(value)) for value in values.tolist()]
    pairs = zip(steps.tolist(), words, [None, *words], strict=False)
    return [(step, word) for step, word, before in pairs if word and word != before]


def thin(curve: Curve, points: int = POINTS) -> Curve:
    """Reduces a curve to at most `points` points.

    Keeps both ends, and the lowest, the highest and one non-finite value of each stretch, so that a spike of one step
    and a single NaN stay visible.

    Raises:
        ValueError: `points` is below 8.
    """
    if points < 8:
        raise ValueError(f"points={points} is below 8")
    steps, values = curve
    if len(steps) <= points:
        return curve
    kept: list[np.ndarray] = [np.array([0, len(steps) - 1])]
    # Two lengths of stretches, the longer ones first: as matrices, in place of a loop over the stretches.
    length, longer = divmod(len(steps), (points - 2) // 3)
    cut = longer * (length + 1)
    for first, stretches in ((0, values[:cut].reshape(-1, length + 1)), (cut, values[cut:].reshape(-1, length))):
        starts = first + np.arange(len(stretches)) * stretches.shape[1]
        finite = np.isfinite(stretches)
        broken, sound = ~finite.all(1), finite.any(1)
        kept += [
            (starts + np.argmin(finite, 1))[broken],
            (starts + np.argmin(np.where(finite, stretches, np.inf), 1))[sound],
            (starts + np.argmax(np.where(finite, stretches, -np.inf), 1))[sound],
        ]
    chosen = np.unique(np.concatenate(kept).astype(np.int64))
    return steps[chosen], values[chosen]
