"""One run, read and reduced to what a comparison needs.

What is kept of each metric of a run: its first, last, lowest and highest value, in four floats a name.

A run, finished or not, whole or damaged, reduced to what a comparison needs.

Of its `metrics.jsonl` only the first, last, lowest and highest value of every name stay, so that ten thousand runs are
held in some hundred megabytes; a curve is read from the file when it is asked for. `runs.py` makes it from its folder.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stabletrain.compare.reading.columns import Columns, Curve, Sheet, joined, read_columns, thin
from stabletrain.compare.reading.settings import Value


class Range(NamedTuple):
    """What was logged under one name, rolled-back lines left out; each NaN where nothing was, or no number.

    Attributes:
        first, last: as they are, so NaN and infinities too.
        lowest, highest: of all but NaN.
    """

    first: float = math.nan
    last: float = math.nan
    lowest: float = math.nan
    highest: float = math.nan


NOTHING = Range()
"""Of a name that was never logged."""


class Ranges(Mapping[str, Range]):
    """Name to `Range`, read only; ten thousand of them share their names."""

    def __init__(self, names: tuple[str, ...], values: np.ndarray) -> None:
        """`values`: float64 `[names, 4]`, in the order of `Range`."""
        self._names, self._values = names, values

    @classmethod
    def of(cls, sheets: list[Sheet]) -> "Ranges":
        """Those of a file's lines."""
        found: dict[str, list[float]] = {}
        ends: dict[str, tuple[int, int]] = {}
        for sheet in sheets:
            first, last = int(sheet.rows[0]), int(sheet.rows[-1])
            table = [sheet.values[0], sheet.values[-1], np.fmin.reduce(sheet.values), np.fmax.reduce(sheet.values)]
            for name, numbers in zip(sheet.names, np.stack(table, axis=1).tolist(), strict=True):
                if name not in found:
                    found[name], ends[name] = numbers, (first, last)
                    continue
                so_far, (begin, end) = found[name], ends[name]
                found[name] = [
                    numbers[0] if first < begin else so_far[0],
                    numbers[1] if last > end else so_far[1],
                    float(np.fmin(so_far[2], numbers[2])),
                    float(np.fmax(so_far[3], numbers[3])),
                ]
                ends[name] = min(first, begin), max(last, end)
        return cls(tuple(found), np.array([*found.values()]).reshape(-1, 4))

    def __getitem__(self, name: str) -> Range:
        return Range(*self._values[places(self._names)[name]].tolist())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> tuple:
        return restored, (self._names, self._values.tobytes())


@lru_cache(maxsize=1024)
def places(names: tuple[str, ...]) -> dict[str, int]:
    """The row of each name."""
    return {name: row for row, name in enumerate(names)}


@lru_cache(maxsize=1024)
def one(names: tuple[str, ...]) -> tuple[str, ...]:
    """The first tuple that was equal to this one, so that the others can be forgotten."""
    return names


def restored(names: tuple[str, ...], values: bytes) -> Ranges:
    """From its pickle, in which an array's own description would be longer than its numbers."""
    return Ranges(one(names), np.frombuffer(values).reshape(-1, 4))


ENDED = ("finished", "halted", "preempted", "failed")
"""What a run can say of itself once it has stopped."""


@dataclass(frozen=True)
class Run:
    """One run; it holds no metric's values but their `Range`, and can be pickled.

    Attributes:
        folder: where it lies.
        status: finished, halted, preempted, failed or running, as its record says; `empty` where it never took a step,
            `broken` where its record or metrics cannot be read.
        problem: what a reader should know of it, one sentence; None where there is nothing.
        record: its `run.json`; empty where that cannot be read.
        settings: key to plain value; see `settings.py`.
        composed: whether `settings` is the whole configuration, and not only what was typed.
        overrides: what was typed for it, key to value, later ones winning.
        steps: the last step that was logged; 0 without one.
        incidents: mappings with step, kind, cause, verdict, fix and path, in their order.
        skips: the steps whose update was withheld, but for fp16's routine overflow, in their order.
        rollbacks: how many.
        best: lowest validation loss, and its step; NaN and 0 without one.
        seconds: between the first and the last line.
        ranges: name to its `Range`.
    """

    folder: Path
    status: str
    problem: str | None
    record: dict[str, Any]
    settings: dict[str, Value]
    composed: bool
    overrides: dict[str, str]
    steps: int = 0
    incidents: list[dict[str, Any]] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)
    rollbacks: int = 0
    best: tuple[float, int] = (math.nan, 0)
    seconds: float = math.nan
    ranges: Mapping[str, Range] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's own name: of a sweep's run its number."""
        return self.folder.name

    @property
    def sweep(self) -> str:
        """The name of the folder that holds it and its siblings."""
        return self.folder.parent.name

    @property
    def card(self) -> str | None:
        """The product name of what it ran on, `cpu` where that was no card; None if that is not recorded."""
        return self.record.get("hardware", {}).get("name")

    @property
    def precision(self) -> str | None:
        """The precision it ran in; what was asked for, such as auto, where that is not recorded."""
        return self.record.get("hardware", {}).get("precision") or self.record.get("choices", {}).get("precision")

    @property
    def parameters(self) -> int | None:
        """How many numbers its model trains, or holds; None if that is not recorded."""
        count = self.record.get("model", {}).get("parameters")
        return count if isinstance(count, int) else None

    @property
    def spike_score(self) -> float:
        """Share of the steps whose loss was a spike, as the run itself counted them at every step (`watch/spikes`)."""
        return self.last("spike/score")

    @property
    def diverged(self) -> bool:
        """Whether it was halted, or ended with a validation loss that is not finite."""
        return self.status == "halted" or (self.status == "finished" and not math.isfinite(self.last("val/loss")))

    def first(self, name: str) -> float:
        """The first value logged under `name`; NaN where there is none."""
        return self.ranges.get(name, NOTHING).first

    def last(self, name: str) -> float:
        """The last value logged under `name`; NaN where there is none."""
        return self.ranges.get(name, NOTHING).last

    def lowest(self, name: str) -> float:
        """The lowest value logged under `name` or under a name that continues it after a slash; NaN without any."""
        return float(np.fmin.reduce([each.lowest for each in self._below(name)], initial=math.nan))

    def highest(self, name: str) -> float:
        """The highest of the same."""
        return float(np.fmax.reduce([each.highest for each in self._below(name)], initial=math.nan))

    def curve(self, name: str, points: int | None = None) -> Curve:
        """Steps and values of a metric, rolled-back lines left out; empty where there is none.

        Read from the folder when first asked for, so that it can be newer than the rest of a run that is going on.
        Thinned to at most 500 points, those with the lowest and highest values of each stretch and both ends kept.

        Args:
            points: another number of points; -1 for all of them, which reads the file once more.
        """
        if points is not None:
            curve = self._columns().curve(name)
            return curve if points < 0 else thin(curve, points)
        return self._curves[0].get(name) or joined([], name)

    def abandoned(self, name: str) -> list[Curve]:
        """The same for what was rolled back, each stretch by itself, in the order in which they were run."""
        return self._curves[1].get(name, [])

    def _below(self, name: str) -> list[Range]:
        return [each for key, each in self.ranges.items() if key == name or key.startswith(f"{name}/")]

    def _columns(self) -> Columns:
        try:
            return read_columns(self.folder / "metrics.jsonl")
        except OSError:
            return Columns()

    @cached_property
    def _curves(self) -> tuple[dict[str, Curve], dict[str, list[Curve]]]:
        columns = self._columns()
        kept, gone = (
            {name for sheet in sheets for name in sheet.names} for sheets in (columns.kept, columns.rolled_back)
        )
        return (
            {name: thin(columns.curve(name)) for name in kept},
            {name: [thin(stretch) for stretch in columns.abandoned(name)] for name in gone},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_curves"}
