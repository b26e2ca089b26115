"""The signals' values over the last looks, and their trends.

Each look adds one value to the series of every signal and place. A trend is fitted over the looks since the last change
of regime (the end of a warmup, the begin of a decay), so nothing is extrapolated across one. It is extended as far
ahead as its looks reach back, and no further than the horizon.

A trend is a robust line through the last looks, for many series at once (Theil 1950, Sen 1968):

    slope = median over pairs of (y_j - y_i) / (x_j - x_i),      value = median of (y_i - slope x_i) + slope x

Of up to 29 % wrong points it takes no notice. The time x is either the step, so a logarithm y of a signal grows
exponentially, or the logarithm of the steps since the learning rate began to rise, stay or fall, so it grows by a power
of them, as weights do early in training and during a linear warmup. Each series gets the line with the smaller error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from stabletrain.beside.forecast.signals import LOSS, SIGNALS, values_of

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
    looks = len(steps)
    first, second = pairs(looks)
    times = time(steps, origin)
    heights = np.clip(heights, -LARGEST, LARGEST)
    slopes = np.sort((heights[:, second] - heights[:, first]) / (times[second] - times[first]), axis=1)
    slope = middle(slopes)
    flat = heights - slope[:, None] * (times - times[-1])
    value = middle(np.sort(flat, axis=1))
    # Kendall's tau under no trend: standard deviation of the number of rising less falling pairs.
    spread = 1.2816 * (looks * (looks - 1) * (2 * looks + 5) / 18) ** 0.5 / len(first) / 2
    low, high = quantile(slopes, max(0.0, 0.5 - spread)), quantile(slopes, min(1.0, 0.5 + spread))
    error = np.abs(flat - value[:, None]).mean(axis=1)
    return Trends(value, slope, low, high, error, float(steps[-1]), origin)


@cache
def pairs(looks: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first and the second of each two looks."""
    return np.triu_indices(looks, 1)


def middle(ordered: np.ndarray) -> np.ndarray:
    """Returns the medians of rows in rising order. For short rows, numpy's takes several times as long."""
    half = ordered.shape[1] // 2
    return ordered[:, half] if ordered.shape[1] % 2 else (ordered[:, half - 1] + ordered[:, half]) / 2


def quantile(ordered: np.ndarray, share: float) -> np.ndarray:
    """Returns a quantile of rows in rising order, interpolated as numpy's, to the bit."""
    place = share * (ordered.shape[1] - 1)
    below = int(place)
    above = min(below + 1, ordered.shape[1] - 1)
    part, length = place - below, ordered[:, above] - ordered[:, below]
    return ordered[:, below] + length * part if part < 0.5 else ordered[:, above] - length * (1 - part)


def median(values: Sequence[float]) -> float:
    """Returns the median; NaN if a value is NaN. For a few values, numpy's takes ten times as long."""
    if any(map(math.isnan, values)):
        return math.nan
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


SPREAD = 3
"""Looks whose median is the level of a signal: a single odd look is no trouble."""

SETTLED = 2
"""The first step whose look belongs to a trend: the look at step 1 shows the initial weights."""


THRESHOLDS = {signal.name: signal.height(signal.threshold) for signal in SIGNALS}
"""Heights at which trouble begins, by signal."""


Key = tuple[str, str]
"""Name of a signal, and a place in the model."""


@dataclass(frozen=True)
class Heights:
    """Heights of all signals at one look; see `signals.py`.

    Attributes:
        now: by signal and place, the median of the last looks.
        later: as far ahead as the trend is extended; only for series with a trend.
        crossings: step at which the threshold is reached; only for series that rise to it as far as they are extended.
        slopes: change of the height a step, where there is a trend; 0 if its sign is not certain.
    """

    now: Mapping[Key, float]
    later: Mapping[Key, float]
    crossings: Mapping[Key, float]
    slopes: Mapping[Key, float]


@dataclass
class Series:
    """The series of a run.

    Attributes:
        horizon: steps ahead to which trends are extended.
    """

    horizon: int
    _series: dict[str, list[list[float]]] = field(init=False, default_factory=dict)
    _rates: list[float] = field(init=False, default_factory=list)
    _since: int = field(init=False, default=0)
    _losses: list[float] = field(init=False, default_factory=list)
    _sum: float = field(init=False, default=0.0)
    _count: int = field(init=False, default=0)

    def add_loss(self, loss: float) -> None:
        """Adds the loss of an applied step, in nats; the mean since the last look is what counts."""
        self._sum, self._count = self._sum + loss, self._count + 1

    def add(self, step: int, metrics: Mapping[str, float]) -> Heights:
        """Adds a look, and returns the signals' heights.

        Args:
            step: of the look.
            metrics: of the look: `monitors/...`, `grad/norm`, `lr`, `precision/loss_scale`.
        """
        self._note_regime(step, metrics.get("lr", math.nan))
        seen = {**metrics, **self._loss_rise()}
        # The loss is scaled in fp16: only then loss scale and headroom are signals.
        scaled = metrics.get("precision/loss_scale", 1.0) != 1.0 or "loss_scale|" in self._series
        found = values_of(seen)
        for signal in SIGNALS:
            if signal.name in ("loss_scale", "headroom") and not scaled:
                continue
            for place, value in found[signal.name].items():
                if signal.name == "grad_norm" and scaled and not math.isfinite(value):
                    continue  # a routine overflow
                series = self._series.setdefault(f"{signal.name}|{place}", [])
                series.append([step, signal.height(value)])
                del series[:-LOOKS]
        # A signal that only some looks measure keeps its last level in between.
        recent = {key: points for key, points in self._series.items() if points[-1][0] > step - self.horizon}
        now: dict[Key, float] = {}
        for key, points in recent.items():
            name, _, place = key.partition("|")
            now[name, place] = median([height for _, height in points[-SPREAD:]])
        return Heights(now, *self._trends(now, step))

    def _note_regime(self, step: int, rate: float) -> None:
        """Notes when the learning rate begins to rise, stay or fall."""
        if not 0 < rate < math.inf:
            return
        self._rates = [*self._rates, rate][-3:]
        if len(self._rates) == 3:
            before, after = (
                int(np.sign(round(math.log(later) - math.log(earlier), 6)))
                for earlier, later in zip(self._rates, self._rates[1:], strict=False)
            )
            if before != after:
                self._since = step

    def _loss_rise(self) -> dict[str, float]:
        """Returns how far the mean loss since the last look is above the best, as a share of what was learnt."""
        if not self._count:
            return {}
        mean = self._sum / self._count
        self._sum, self._count = 0.0, 0
        if not math.isfinite(mean):
            return {LOSS: math.inf}
        first, best = (self._losses[0], min(self._losses[1], mean)) if self._losses else (mean, mean)
        self._losses = [first, best]
        return {LOSS: (mean - best) / max(first - best, 1e-9) if first > best else 0.0}

    def _trends(self, now: Mapping[Key, float], step: int) -> tuple[dict[Key, float], ...]:
        """Returns heights ahead, steps of crossing, and slopes, of the series with enough looks for a trend."""
        groups: dict[tuple[float, ...], dict[Key, tuple[float, ...]]] = {}
        since = max(self._since, SETTLED)
        for key in now:
            points = [point for point in self._series[f"{key[0]}|{key[1]}"] if point[0] >= since]
            if len(points) < LEAST:
                continue
            steps, heights = zip(*points, strict=True)
            if all(map(math.isfinite, heights)):
                groups.setdefault(steps, {})[key] = heights
        later, crossings, slopes = {}, {}, {}
        for steps, keys in groups.items():
            heights, looks = np.array([*keys.values()]), np.array(steps)
            lines = trends(looks, heights), trends(looks, heights, self._origin(steps))
            reach = min(float(self.horizon), step - steps[0])
            here, ahead = [line.at(step) for line in lines], [line.at(step + reach) for line in lines]
            now_slopes = [line.slope_now() for line in lines]
            for number, key in enumerate(keys):
                which = int(lines[1].error[number] < lines[0].error[number])
                line = lines[which]
                slopes[key] = slope = float(now_slopes[which][number]) if line.low[number] > 0 else 0.0
                later[key] = float(ahead[which][number]) if slope > 0 else float(line.value[number])
                threshold = THRESHOLDS[key[0]]
                if slope > 0 and here[which][number] < threshold <= ahead[which][number]:
                    crossings[key] = line.reach(number, threshold)
        return later, crossings, slopes

    def _origin(self, steps: Sequence[float]) -> float:
        """Returns the step at which the present regime began, as far as the looks tell: before the first of `steps`."""
        return min(0.0, steps[0] - 1.0) if self._since == 0 else self._since - (steps[1] - steps[0])

    def state_dict(self) -> dict:
        """The values of the last looks."""
        return {
            "series": {name: [list(point) for point in points] for name, points in self._series.items()},
            "rates": list(self._rates),
            "since": self._since,
            "losses": list(self._losses),
            "sum": self._sum,
            "count": self._count,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores them. A checkpoint of a run without a forecast has none."""
        self._series = {name: [list(p) for p in points] for name, points in state.get("series", {}).items()}
        self._rates, self._since = list(state.get("rates", [])), state.get("since", 0)
        self._losses = list(state.get("losses", []))
        self._sum, self._count = state.get("sum", 0.0), state.get("count", 0)
