"""`metrics.jsonl` as columns: an array of steps and one of values for each name, instead of a dict for each line.

Ten million lines as dicts would be some tens of gigabytes. Lines of the same names are one matrix of float64; NaN and
infinities, which the file writes as words, are floats again.
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

BLOCK = 1 << 22
"""Bytes that are parsed at once: what bounds the memory that a long file takes."""

POINTS = 500
"""Points at most of a curve that is to be drawn."""

Curve = tuple[np.ndarray, np.ndarray]
"""Steps (int64) and values (float64), of equal length."""


@dataclass
class Sheet:
    """The lines that have the same names.

    Attributes:
        names: theirs, in the order of the lines.
        rows: which lines of the file these are, int64 `[lines]`.
        values: float64 `[lines, names]`; NaN where a value is no number.
    """

    names: tuple[str, ...]
    rows: np.ndarray
    values: np.ndarray

    def column(self, name: str) -> np.ndarray:
        """The values of one name, `[lines]`."""
        return self.values[:, self.names.index(name)]

    def where(self, chosen: np.ndarray) -> "Sheet":
        """The lines for which `chosen`, bool `[lines]`, is true."""
        return Sheet(self.names, self.rows[chosen], self.values[chosen])


@dataclass
class Columns:
    """A file's lines.

    Attributes:
        kept: the lines that are the run's course, by their names.
        rolled_back: those that a rollback took back.
        lines: how many could be read.
        unreadable: how many could not, not counting a last one without its end.
    """

    kept: list[Sheet] = field(default_factory=list)
    rolled_back: list[Sheet] = field(default_factory=list)
    lines: int = 0
    unreadable: int = 0

    def curve(self, name: str) -> Curve:
        """Every value of the run's course under `name`; empty where there is none."""
        return joined(self.kept, name)

    def abandoned(self, name: str) -> list[Curve]:
        """Every value under `name` that was rolled back, each stretch by itself, in the order they were run in."""
        found = [sheet for sheet in self.rolled_back if name in sheet.names]
        attempts = np.unique(np.concatenate([attempt(sheet) for sheet in found])) if found else []
        return [joined([sheet.where(attempt(sheet) == number) for sheet in found], name) for number in attempts]


def joined(sheets: list[Sheet], name: str) -> Curve:
    """One name's values from several sheets, in the order of the file."""
    found = [sheet for sheet in sheets if name in sheet.names]
    if not found:
        return np.empty(0, np.int64), np.empty(0)
    steps = np.concatenate([sheet.column("step") for sheet in found]).astype(np.int64)
    values = np.concatenate([sheet.column(name) for sheet in found])
    by_row = np.argsort(np.concatenate([sheet.rows for sheet in found]), kind="stable")
    return steps[by_row], values[by_row]


def attempt(sheet: Sheet) -> np.ndarray:
    """How many rollbacks there had been when each line was written, `[lines]`."""
    return sheet.column("guard/rollbacks") if "guard/rollbacks" in sheet.names else np.zeros(len(sheet.rows))


def read_columns(file: Path) -> Columns:
    """The lines of a `metrics.jsonl`; none of a file that is not there.

    Lines that are torn, no object, or without a step are left out.

    Raises:
        OSError: the file cannot be read.
    """
    found = Columns()
    parts: dict[tuple[str, ...], list[tuple[np.ndarray, np.ndarray]]] = {}
    for values, unreadable in blocks(file):
        lines = [line for line in values if isinstance(line, dict) and isinstance(line.get("step"), int)]
        found.unreadable += unreadable + len(values) - len(lines)
        alike: dict[tuple[str, ...], list[int]] = {}
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
    """The values of a file of JSON lines, some megabytes at a time, and how many lines of these are no JSON.

    A last line without its end that is no JSON, as of a run that is just writing it, is no such line.
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
    """The values of some lines, and how many of the lines are no JSON."""
    try:
        return orjson.loads(b"[" + text.replace(b"\n", b",") + b"]"), 0  # a third faster than line by line
    except ValueError:
        pass
    values, unreadable = [], 0
    for line in text.split(b"\n"):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line))  # takes what others write: a bare NaN, numbers above 64 bits
        except ValueError:
            unreadable += 1
    return values, unreadable


def matrix(lines: list[dict[str, Any]], names: int) -> np.ndarray:
    """Lines of the same names as float64 `[lines, names]`; what is no number, nor the word for one, becomes NaN."""
    values = chain.from_iterable(map(dict.values, lines))
    try:
        numbers = np.fromiter(values, np.float64, len(lines) * names)  # a list of rows would take twice as long
    except (TypeError, ValueError, OverflowError):
        numbers = np.array([as_float(value) for line in lines for value in line.values()], np.float64)
    return numbers.reshape(len(lines), names)


def as_float(value: Any) -> float:
    """A JSON value as a number, NaN where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def thin(curve: Curve, points: int = POINTS) -> Curve:
    """At most `points` of a curve's points: both ends, and the lowest, highest and a non-finite one of each stretch.

    So a spike of one step, and a single NaN, stay visible.

    Raises:
        ValueError: `points` below 8.
    """
    if points < 8:
        raise ValueError(f"points={points} is below 8")
    steps, values = curve
    if len(steps) <= points:
        return curve
    kept = [0, len(steps) - 1]
    for stretch in np.array_split(np.arange(len(steps)), (points - 2) // 3):
        finite = np.isfinite(values[stretch])
        if not finite.all():
            kept.append(stretch[np.argmin(finite)])
        if finite.any():
            among = stretch[finite]
            kept += [among[np.argmin(values[among])], among[np.argmax(values[among])]]
    chosen = np.unique(kept)
    return steps[chosen], values[chosen]
