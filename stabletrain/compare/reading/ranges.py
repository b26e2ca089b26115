"""What is kept of each metric of a run: its first, last, lowest and highest value, in four floats a name."""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stabletrain.compare.reading.columns import Sheet


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
