"""Finds the guilty samples of a held step: those without which the rest of the step is within all limits.

Group testing. First a part of the step that is sound: one of its halves, else one of its quarters, and so on. Then the
other samples are added to it, half of them at a time. If the step is still sound with them, they stay; if not, that
half is halved. A single sample with which it is not sound is guilty. What stays in the end was run, and was within all
limits.

For one guilty sample of n the step runs at most 1 + 2 log2 n times. The search ends after 9 + 4 log2 n runs; what is
unknown then is left out too. All ranks run the same search on the same numbers, so they agree on its result.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """A sample of a step: its rank, the micro-batch of that rank, and its row there."""

    rank: int
    micro_batch: int
    row: int


Counts = Sequence[Sequence[int]]
"""For each rank, the number of samples of each of its micro-batches; 1 for one whose samples are not known."""


def all_samples(counts: Counts) -> list[Sample]:
    """Returns all samples of a step, by rank, micro-batch and row."""
    return [
        Sample(rank, number, row)
        for rank, sizes in enumerate(counts)
        for number, size in enumerate(sizes)
        for row in range(size)
    ]


class OutOfRuns(Exception):
    """The search has used up its runs of the step."""


class Search:
    """The search for the guilty samples of one step.

    Args:
        counts: see `Counts`.
        is_sound: runs the step without some of its samples; returns whether it is within all limits. All ranks call it.
    """

    def __init__(self, counts: Counts, is_sound: Callable[[Collection[Sample]], bool]) -> None:
        self._counts, self._is_sound = counts, is_sound
        self._all = frozenset(all_samples(counts))
        self._known: dict[frozenset[Sample], bool] = {}
        self._left = 9 + 4 * math.ceil(math.log2(max(len(self._all), 1)))

    def find(self) -> list[Sample]:
        """Returns the guilty samples; none if they cannot be named, or if the step is sound with all of its samples."""
        kept: list[Sample] = []
        try:
            if len(self._all) < 2 or self._sound(self._all):
                return []
            kept, suspects = self._sound_part()
            while suspects:
                part = suspects.popleft()
                if self._sound([*kept, *part]):
                    kept += part
                elif len(part) > 1:
                    suspects.extend(self._halves(part))
        except OutOfRuns:
            pass
        return sorted(self._all.difference(kept)) if kept else []

    def _sound_part(self) -> tuple[list[Sample], deque[list[Sample]]]:
        """Returns a part of the step that is sound, as large as possible, and the other parts; no part without one."""
        # Ranks wait for each other in every micro-batch, so each part takes samples of all of them.
        spread = len(self._counts) > 1
        samples = sorted(self._all, key=lambda each: (each.row, each.micro_batch, each.rank) if spread else each)
        parts = [samples]
        while any(len(part) > 1 for part in parts):
            parts = [half for part in parts for half in (self._halves(part) if len(part) > 1 else [part])]
            for number, part in enumerate(parts):
                if self._sound(part):
                    return [*part], deque(parts[:number] + parts[number + 1 :])
        return [], deque()

    def _halves(self, part: list[Sample]) -> list[list[Sample]]:
        """Returns the halves of several samples: in one process between micro-batches, as long as there are several."""
        numbers = sorted({each.micro_batch for each in part})
        if len(self._counts) == 1 and len(numbers) > 1:
            middle = sum(each.micro_batch < numbers[len(numbers) // 2] for each in part)
        else:
            middle = len(part) // 2
        return [part[:middle], part[middle:]]

    def _sound(self, kept: Collection[Sample]) -> bool:
        """Runs the step with these samples only, if they suffice to run it."""
        asked = frozenset(kept)
        if asked not in self._known:
            if not can_run(self._counts, asked):
                return False
            if not self._left:
                raise OutOfRuns
            self._left -= 1
            self._known[asked] = self._is_sound(self._all - asked)
        return self._known[asked]


def can_run(counts: Counts, kept: Collection[Sample]) -> bool:
    """Returns whether a step can be run with these samples only: with several ranks, each micro-batch needs one."""
    places = {(each.rank, each.micro_batch) for each in kept}
    return len(places) == sum(map(len, counts)) if len(counts) > 1 else bool(places)
