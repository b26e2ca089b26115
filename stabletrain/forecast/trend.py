"""A robust straight line through the last looks, for many series at once (Theil 1950, Sen 1968).

    slope = median over pairs of (y_j - y_i) / (t_j - t_i),      value = median of (y_i - slope t_i) + slope t

Of up to 29 % wrong points it takes no notice.
"""

from dataclasses import dataclass

import numpy as np

LOOKS = 12
"""Looks that a trend uses at most."""

LEAST = 4
"""Looks that a trend needs."""


@dataclass(frozen=True)
class Trends:
    """Lines through series with the same steps; arrays `[series]`.

    Attributes:
        value: of the line at the last step.
        slope: change a step.
        low, high: 80 % interval of the slope: quantiles of the pairs' slopes, closer together the more pairs agree.
    """

    value: np.ndarray
    slope: np.ndarray
    low: np.ndarray
    high: np.ndarray


def trends(steps: np.ndarray, heights: np.ndarray) -> Trends:
    """Returns the lines of `heights` `[series, look]` at `steps` `[look]`, at least two."""
    first, second = np.triu_indices(len(steps), 1)
    slopes = (heights[:, second] - heights[:, first]) / (steps[second] - steps[first])
    slope = np.median(slopes, axis=1)
    value = np.median(heights - slope[:, None] * (steps - steps[-1]), axis=1)
    # Kendall's tau under no trend: standard deviation of the number of rising less falling pairs.
    looks = len(steps)
    spread = 1.2816 * (looks * (looks - 1) * (2 * looks + 5) / 18) ** 0.5 / len(first) / 2
    low, high = np.quantile(slopes, [max(0.0, 0.5 - spread), min(1.0, 0.5 + spread)], axis=1)
    return Trends(value, slope, low, high)
