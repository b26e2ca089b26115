"""Robust lines through the last looks, for many series at once (Theil 1950, Sen 1968).

    slope = median over pairs of (y_j - y_i) / (x_j - x_i),      value = median of (y_i - slope x_i) + slope x

Of up to 29 % wrong points it takes no notice. The time x is either the step, so a logarithm y of a signal grows
exponentially, or the logarithm of the steps since the learning rate began to rise, stay or fall, so it grows by a power
of them, as weights do early in training and during a linear warmup. Each series gets the line with the smaller error.
"""

from dataclasses import dataclass

import numpy as np

LOOKS = 12
"""Looks that a trend uses at most."""

LEAST = 6
"""Looks that a trend needs."""

LARGEST = 1e30
"""Heights are limited to it, so that slopes are finite."""


@dataclass(frozen=True)
class Trends:
    """Lines through series with the same steps; arrays `[series]`.

    Attributes:
        value: of the line at the last step.
        slope: change in a unit of the line's time.
        low, high: 80 % interval of the slope: quantiles of the pairs' slopes, closer together the more pairs agree.
        error: mean absolute distance from the points.
        last: the last step.
        origin: the step from which the steps of a logarithmic time count; None: the time is the step.
    """

    value: np.ndarray
    slope: np.ndarray
    low: np.ndarray
    high: np.ndarray
    error: np.ndarray
    last: float
    origin: float | None

    def at(self, step: float) -> np.ndarray:
        """Returns the lines' heights at a step."""
        return self.value + self.slope * (time(step, self.origin) - time(self.last, self.origin))

    def slope_now(self) -> np.ndarray:
        """Returns the lines' change a step, at the last step."""
        return self.slope if self.origin is None else self.slope / (self.last - self.origin)

    def reach(self, series: int, height: float) -> float:
        """Returns the step at which a rising line reaches a height above its value; infinity if far beyond."""
        units = (height - self.value[series]) / self.slope[series]
        if self.origin is None:
            return self.last + float(units)
        return self.origin + (self.last - self.origin) * float(np.exp(min(units, 100.0)))


def time(step, origin: float | None):
    """Returns the time of steps: the step, or the logarithm of the steps since `origin`."""
    return step if origin is None else np.log(step - origin)


def trends(steps: np.ndarray, heights: np.ndarray, origin: float | None = None) -> Trends:
    """Returns the lines of `heights` `[series, look]` at `steps` `[look]`, at least two, all above `origin`."""
    first, second = np.triu_indices(len(steps), 1)
    times = time(steps, origin)
    heights = np.clip(heights, -LARGEST, LARGEST)
    slopes = (heights[:, second] - heights[:, first]) / (times[second] - times[first])
    slope = np.median(slopes, axis=1)
    flat = heights - slope[:, None] * (times - times[-1])
    value = np.median(flat, axis=1)
    # Kendall's tau under no trend: standard deviation of the number of rising less falling pairs.
    looks = len(steps)
    spread = 1.2816 * (looks * (looks - 1) * (2 * looks + 5) / 18) ** 0.5 / len(first) / 2
    low, high = np.quantile(slopes, [max(0.0, 0.5 - spread), min(1.0, 0.5 + spread)], axis=1)
    error = np.abs(flat - value[:, None]).mean(axis=1)
    return Trends(value, slope, low, high, error, float(steps[-1]), origin)
