"""A change-point test: whether a measured series has left its own recent trend, and since when.

    reference  m = median of the last `PAST` values, without the newest `GAP`
    error      e = x - m
    z            = (e - max(median(e), 0)) / max(1.4826 MAD(e), floor)        over the last `ERRORS` errors
    CUSUM      S = max(0, S + min(max(z, -LARGEST), LARGEST) - ALLOWANCE)     a change: S > threshold

The test is Page's (1954, Biometrika 41), for a rise of the level; the same with -e finds a fall. It accumulates small
shifts that single-step limits (`guard/policy/limits.py`) tolerate. All estimates are medians, so that single
outliers do not move them, and an outlier adds at most `LARGEST - ALLOWANCE` to S.

A trend that is present in the past errors is subtracted only if it makes the test less sensitive. A falling loss
therefore never alarms when its fall slows down. While S is above half its threshold, the reference and the errors stay
as they are: a change must not become its own reference. If that lasts for `ERRORS` values, S begins again at 0.

`SustainedRise` is the same test of a series about which nothing is known, as in a user's own loop. Its scale is that of
the tail, which is wider than the median deviation says if errors have heavy tails, and a rise must last:

    deviation   max(1.4826 MAD(e), (q90(e) - median(e)) / 1.2816),  q90 without the errors since S left 0
    a change    S > threshold, and `LASTING` values after it began the newest are above half of the first

`threshold(rate)` was fitted to simulated series with heavy tails and autocorrelation
(`tests/reliability/slow_spikes.py`).
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

PAST, GAP, ERRORS = 32, 16, 64
"""Values in the reference, newest values left out of it, and errors from which their spread is computed."""

FIRST, MINIMUM = 64, 16
"""Number of values before the first is judged, and of errors before their spread is used."""

ALLOWANCE, LARGEST = 1.0, 4.0
"""Shift in standard deviations that is tolerated for ever, and bound of a single value's z."""

NORMAL = 1.4826
"""Standard deviation of normally distributed values, divided by their median absolute deviation."""

LASTING, ENDS = 40, 16
"""Values after which a `SustainedRise` is judged, and how many of the first and of the newest are compared."""

TAIL, NORMAL_TAIL = 0.9, 1.2816
"""Quantile of the errors that gives the scale of a `SustainedRise`, and how many deviations it lies above the median of
normally distributed ones."""

AT_ONE, PER_TENFOLD = 13.0, 2.7
"""Threshold at one false alarm in 100,000 values, and by how much it rises for ten times fewer."""


def threshold(rate: float) -> float:
    """Returns the threshold of S at which clean series give `rate` false alarms in 100,000 values; at least 4."""
    return max(AT_ONE - PER_TENFOLD * math.log10(rate), LARGEST)


class ChangePoint:
    """The test of one series.

    Args:
        limit: threshold of S; see `threshold`.
        up, down: whether a rise and a fall of the level are changes.

    Attributes:
        since: step of the first value of the change, as far as it is known; 0 before the first value.
        shift: how far the newest value of `recent` lies from the reference; see there.
    """

    def __init__(self, limit: float, *, up: bool = True, down: bool = True) -> None:
        self._limit, self._signs = limit, [sign for sign, wanted in ((1, up), (-1, down)) if wanted]
        self.reset()

    def reset(self) -> None:
        """Forgets all values: the level has changed for good."""
        self._values: deque[float] = deque(maxlen=PAST + GAP)
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._ordered: list[float] = []  # the errors, smallest first
        self._sums, self._onsets = [0.0] * len(self._signs), [0] * len(self._signs)
        self._known: list[float] = []  # reference, median error and its deviation, while a change is suspected
        self._count = self._held = 0
        self._excess: list[float] = []

    @property
    def statistic(self) -> float:
        """S divided by its threshold, the larger of both directions: a change above 1, suspicion above one half."""
        return max(self._sums) / self._limit

    @property
    def since(self) -> int:
        """Step of the value at which the larger S last left 0: the estimated start of the change."""
        return self._onsets[self._sums.index(max(self._sums))]

    @property
    def shift(self) -> float:
        """Median distance of the values since then from the reference; 0 if S is 0."""
        return median(self._excess) if self._excess else 0.0

    @property
    def level(self) -> float | None:
        """Median of the recent values; None before the first."""
        return median(self._values) if self._values else None

    @property
    def falling(self) -> bool:
        """Whether the newest values lie below the others, and no rise is suspected."""
        newest = list(self._values)[-GAP // 2 :]
        return bool(newest) and self.statistic < 0.5 and median(newest) < median(self._values)

    def add(self, step: int, value: float, floor: float = 0.0) -> float:
        """Adds the finite value of a step; returns `statistic`.

        Args:
            floor: least standard deviation that the test assumes: shifts below it never alarm.
        """
        self._count += 1
        if len(self._values) < PAST // 2 + GAP // 2:
            self._values.append(value)
            return 0.0
        held = self._known if self._known and self.statistic > 0.5 else None
        if held is None:
            values = list(self._values)
            reference, known = median(values[: max(len(values) - GAP, GAP // 2)]), self._spread()
        else:
            reference, known = held[0], (held[1], held[2])
        error = value - reference
        if known is not None and self._count > FIRST:
            self._accumulate(step, error, known[0], max(known[1], floor))
            self._known = [reference, *known]
        self._held = 0 if held is None else self._held + 1
        if held is None:
            self._values.append(value)
            self._add_error(error)
        elif self._held >= ERRORS:
            self._sums, self._excess = [0.0] * len(self._signs), []
        return self.statistic

    def _spread(self) -> tuple[float, float] | None:
        """Returns median and robust standard deviation of the errors; None while there are too few."""
        if len(self._errors) < MINIMUM:
            return None
        middle = median_of_ordered(self._ordered)
        return middle, NORMAL * median([abs(error - middle) for error in self._ordered])

    def _add_error(self, error: float) -> None:
        if len(self._errors) == ERRORS:
            del self._ordered[bisect_left(self._ordered, self._errors[0])]
        self._errors.append(error)
        insort(self._ordered, error)

    def _accumulate(self, step: int, error: float, middle: float, deviation: float) -> None:
        before = max(self._sums)
        for i, sign in enumerate(self._signs):
            distance = sign * error - max(sign * middle, 0.0)
            z = distance / deviation if deviation > 0 else math.copysign(LARGEST, distance) if distance else 0.0
            if self._sums[i] == 0.0:
                self._onsets[i] = step
            self._sums[i] = max(0.0, self._sums[i] + min(max(z, -LARGEST), LARGEST) - ALLOWANCE)
        if max(self._sums) == 0.0:
            self._excess = []
        elif before == 0.0 or len(self._excess) < ERRORS:
            self._excess.append(error)

    def state_dict(self) -> dict:
        """Values, errors and sums, for the checkpoint."""
        return {
            "values": list(self._values),
            "errors": list(self._errors),
            "sums": list(self._sums),
            "onsets": list(self._onsets),
            "known": list(self._known),
            "count": self._count,
            "held": self._held,
            "excess": list(self._excess),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores them."""
        self._values = deque(state["values"], maxlen=self._values.maxlen)
        self._errors = deque(state["errors"], maxlen=self._errors.maxlen)
        self._ordered = sorted(self._errors)
        self._sums, self._onsets = list(state["sums"]), list(state["onsets"])
        self._known, self._excess = list(state["known"]), list(state["excess"])
        self._count, self._held = state["count"], state["held"]


class SustainedRise(ChangePoint):
    """The test of a series with any distribution, for a rise that lasts: one that decays soon is none.

    Args:
        limit: see `ChangePoint`.
    """

    def __init__(self, limit: float) -> None:
        super().__init__(limit, down=False)

    def add(self, step: int, value: float, floor: float = 0.0) -> float:
        """Adds the finite value of a step; returns `statistic`, and at most 1 until the rise has lasted."""
        statistic = super().add(step, value, floor)
        if statistic <= 1:
            return statistic
        if len(self._excess) < LASTING:
            return 1.0
        if median(self._excess[-ENDS:]) < median(self._excess[:ENDS]) / 2:
            # It has decayed, perhaps to another level than before: the reference goes on with what was held back.
            self._values.extend(self._known[0] + error for error in self._excess[-self._held :])
            self._sums, self._excess = [0.0], []
        return self.statistic

    def _spread(self) -> tuple[float, float] | None:
        found = super()._spread()
        if found is None:
            return None
        middle, deviation = found
        # Without the errors since S left 0: a change must not be its own scale.
        errors = list(self._errors)[: max(len(self._errors) - len(self._excess), MINIMUM)]
        high = sorted(errors)[int(TAIL * len(errors))]
        return middle, max(deviation, (high - middle) / NORMAL_TAIL)


def median(values: "deque[float] | list[float]") -> float:
    """Returns the median of at least one number."""
    return median_of_ordered(sorted(values))


def median_of_ordered(values: Sequence[float]) -> float:
    """Returns the median of at least one number, smallest first."""
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
