"""Spikes: values far from the rolling mean of those just before them. The package has this one definition only.

    z(x) = (x - mean) / std       over the last `window` values, x itself not among them
    spike score = share of values with |z| >= sigma

Source: OLMo 2, arXiv 2501.00656, section 3.1 (window 1,000, seven standard deviations), for losses and gradient norms.
Mean and standard deviation (divided by n) are taken anew from the window each time, in two passes and float64: a
running sum would keep the rounding of every huge value that ever passed through it.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

MINIMUM = 20
"""Values before anything is judged: with fewer the standard deviation is itself a guess."""

RESOLUTION = 2.0**-23
"""Lowest standard deviation, as a share of the mean: readings are fp32, so below it there is only rounding."""


class Spikes:
    """A window of values, and how many of those that passed through it were spikes.

    Where all values of the window are equal, their standard deviation counts as the mean's fp32 resolution, so that a
    change of one unit in the last place is no spike and any real change is one. A window of zeros has no resolution:
    any other value is then infinitely far.

    Args:
        window: values that are remembered.
        sigma: standard deviations from which on a value is a spike.
        minimum: values in the window before one is judged, at most `window`.

    Raises:
        ValueError: `window` or `minimum` below 2, `minimum` above `window`, or `sigma` not above 0.
    """

    def __init__(self, window: int = 1000, sigma: float = 7.0, minimum: int = MINIMUM) -> None:
        if not 2 <= minimum <= window:
            raise ValueError(f"minimum={minimum} and window={window} do not satisfy 2 <= minimum <= window")
        if not sigma > 0:
            raise ValueError(f"sigma={sigma} is not above 0")
        self.sigma = sigma
        self.minimum = minimum
        self.judged = 0
        self.spikes = 0
        self._values: deque[float] = deque(maxlen=window)
        self._known: tuple[float, float] | None = None

    def z(self, value: float) -> float:
        """Standard deviations of `value` above the window's mean, negative below it.

        A value that is not finite is infinitely far above. With fewer than `minimum` values in the window a finite
        value is 0 away: nothing is known yet.
        """
        if not math.isfinite(value):
            return math.inf
        if len(self._values) < self.minimum:
            return 0.0
        mean, deviation = self._normal()
        distance = value - mean
        if deviation == 0.0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / deviation

    @property
    def limit(self) -> float:
        """Where spikes begin: mean + sigma std of the window; infinite with fewer than `minimum` values in it."""
        if len(self._values) < self.minimum:
            return math.inf
        mean, deviation = self._normal()
        return mean + self.sigma * deviation if deviation else mean

    @property
    def mean(self) -> float:
        """Mean of the window; 0 of an empty one."""
        return self._normal()[0] if self._values else 0.0

    def _normal(self) -> tuple[float, float]:
        """Mean and standard deviation of the window, kept until it changes: they are asked for several times a step."""
        if self._known is None:
            self._known = self._measured()
        return self._known

    def _measured(self) -> tuple[float, float]:
        values = np.fromiter(self._values, np.float64, len(self._values))
        mean = float(values.mean())
        return mean, max(float(values.std()), RESOLUTION * abs(mean))

    def add(self, value: float) -> float:
        """Judges `value` by the window, counts it, and takes it in; returns its z.

        A value that is not finite is neither counted nor taken in. A finite spike is: the loss of a run that has moved
        for good must become the new normal. Who wants it out does not add it.
        """
        distance = self.z(value)
        if not math.isfinite(value):
            return distance
        if len(self._values) >= self.minimum:
            self.judged += 1
            self.spikes += abs(distance) >= self.sigma
        self._values.append(value)
        self._known = None
        return distance

    @property
    def score(self) -> float:
        """Share of the judged values that were spikes, in [0, 1]; 0 before any was judged."""
        return self.spikes / self.judged if self.judged else 0.0

    def state_dict(self) -> dict:
        """Window, oldest value first, and counts."""
        return {"values": list(self._values), "judged": self.judged, "spikes": self.spikes}

    def load_state_dict(self, state: dict) -> None:
        """Puts them back; of a longer window the newest values."""
        self._values, self._known = deque(state["values"], maxlen=self._values.maxlen), None
        self.judged, self.spikes = state["judged"], state["spikes"]


def spike_score(values: Iterable[float], window: int = 1000, sigma: float = 7.0, minimum: int = MINIMUM) -> float:
    """The spike score of a finished run's values, those of skipped steps left out: the same number as `Spikes` gives.

    Raises:
        ValueError: as `Spikes`.
    """
    spikes = Spikes(window, sigma, minimum)
    for value in values:
        spikes.add(value)
    return spikes.score
