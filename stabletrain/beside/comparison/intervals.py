"""A mean with its 95 % interval by Student's t."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

STUDENT = {
    1: 12.7062,
    2: 4.3027,
    3: 3.1824,
    4: 2.7764,
    5: 2.5706,
    6: 2.4469,
    7: 2.3646,
    8: 2.3060,
    9: 2.2622,
}
"""The 97.5 % quantile of Student's t by degrees of freedom: the number of values less one."""


class Interval(NamedTuple):
    """A mean and its interval.

    Attributes:
        mean: of the values; NaN if there are none.
        low, high: the 95 % interval; infinite if there are too few values for one.
        count: number of values.
    """

    mean: float
    low: float
    high: float
    count: int

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside of the interval."""
        return self.low > 0 or self.high < 0

    @property
    def text(self) -> str:
        """The mean and the interval: `+0.016 (+0.01 to +0.022)`."""
        if not self.count:
            return "no pair"
        return f"{self.mean:+.2g}" + (", one pair" if self.count < 2 else f" ({self.low:+.2g} to {self.high:+.2g})")


def student(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t for one degree of freedom or more.

    Above the table by its expansion around the normal quantile (Abramowitz and Stegun, 26.7.5), right to four digits.
    """
    if degrees in STUDENT:
        return STUDENT[degrees]
    x = 1.959963984540054
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return x + sum(term / degrees**power for power, term in enumerate(terms, 1))


def of_independent(values: Sequence[float]) -> Interval:
    """Returns the mean of independent values, such as one per seed, with its interval; infinite for fewer than two."""
    if not values:
        return Interval(math.nan, -math.inf, math.inf, 0)
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf, 1)
    half = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))
