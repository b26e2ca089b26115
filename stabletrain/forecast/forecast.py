"""Foretells trouble: when a signal of the monitors reaches its threshold, and how likely the run breaks or ends worse.

Each look of the monitors adds one value to the series of every signal and place. A trend is fitted over the looks since
the last change of regime (the end of a warmup, the begin of a decay), so nothing is extrapolated across one; after a
rollback the series are those of the restored state. The room is read-only: it returns predictions, and the loop acts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from stabletrain.errors import ConfigError
from stabletrain.forecast.fixes import fixes
from stabletrain.forecast.model import Model, features, fitted
from stabletrain.forecast.signals import BY_NAME, SIGNALS, Signal
from stabletrain.forecast.trend import LEAST, LOOKS, trends

LOSS = "forecast/loss_rise"
SPREAD = 3
"""Looks whose median is the level of a signal: a single odd look is no trouble."""

KEPT = 2
"""States kept at most: those of the first and of the newest alarm."""

AGAIN = 2.0
"""A prediction is repeated within a horizon only if the steps until the crossing changed by more than this factor."""


@dataclass(frozen=True)
class Prediction:
    """What a forecast says at one step about one signal.

    Attributes:
        step: of the look.
        signal, place: which signal, where in the model; the place is "" for the whole model.
        value, threshold: of the signal.
        at, low, high: step at which the threshold is reached, and its 80 % interval; NaN if there is no trend.
        probability: that the run breaks or ends worse.
        horizon: steps ahead that the probability is about.
        fix: overrides, best first.
        text: all of it, in one line.
    """

    step: int
    signal: str
    place: str
    value: float
    threshold: float
    at: float
    low: float
    high: float
    probability: float
    horizon: int
    fix: tuple[str, ...]
    text: str

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the event `forecast`, without the step; unknown times are None."""
        found = {name: value for name, value in asdict(self).items() if name != "step"}
        times = {name: None if math.isnan(found[name]) else round(found[name], 1) for name in ("at", "low", "high")}
        return {**found, **times, "fix": list(self.fix), "probability": round(self.probability, 4)}


def text_of(found: Prediction, signal: Signal, slope: float, healthy: float) -> str:
    """Returns a prediction as one line, without the step.

    Args:
        found: the prediction.
        signal: its signal.
        slope: change of the signal's height a step.
        healthy: the value up to which runs without trouble go.
    """
    what = f"{signal.text}{f' of {found.place}' if found.place else ''}"
    verb = "fall" if signal.falls else "rise"
    if signal.log and slope > 0:
        verb = f"{'halve' if signal.falls else 'double'} every {math.log(2) / slope:,.0f} steps"
    if math.isfinite(found.at):
        when = f"near step {found.at:,.0f} ({found.low:,.0f}-{found.high:,.0f})"
        first = f"{what} {verb} and reach {signal.threshold:g} {when}"
    elif signal.level(signal.height(found.value), healthy) >= 1:
        first = f"{what} are {found.value:.3g}, beyond {signal.threshold:g}"
    else:
        first = f"{what} are {found.value:.3g}, of healthy runs {'at least' if signal.falls else 'at most'} {healthy:g}"
    often = f"{min(99, round(100 * found.probability))} of 100 runs like this break or end worse"
    return f"{first}; {often}; fix: {found.fix[0]}" if found.fix else f"{first}; {often}"


Key = tuple[str, str]
"""Name of a signal, and a place in the model."""


@dataclass(frozen=True)
class Heights:
    """Heights of all signals at one look; see `signals.py`.

    Attributes:
        now: by signal and place, the median of the last looks.
        later: at the end of the horizon if the trend goes on; only for series with a trend.
        crossings: step at which the threshold is reached; only for series that rise to a threshold still ahead.
        slopes: change of the height a step, where there is a trend; 0 if its sign is not certain.
    """

    now: Mapping[Key, float]
    later: Mapping[Key, float]
    crossings: Mapping[Key, float]
    slopes: Mapping[Key, float]


@dataclass(frozen=True)
class Outlook:
    """What a model makes of one look's heights.

    Attributes:
        probability: that the run breaks or ends worse.
        levels, ahead: of each signal, the highest of its places; see `model.py`.
        worst: the signal and place with the highest level ahead; None if no level is above 0.
    """

    probability: float
    levels: Mapping[str, float]
    ahead: Mapping[str, float]
    worst: Key | None


def outlook(heights: Heights, model: Model) -> Outlook:
    """Returns levels, and the probability of trouble."""
    levels: dict[str, float] = {}
    ahead: dict[str, float] = {}
    worst, highest = None, (0.0, 0.0)
    for key, height in heights.now.items():
        signal, healthy = BY_NAME[key[0]], model.healthy[key[0]]
        level = signal.level(height, healthy)
        then = max(level, signal.level(heights.later.get(key, height), healthy))
        levels[signal.name] = max(level, levels.get(signal.name, 0.0))
        ahead[signal.name] = max(then, ahead.get(signal.name, 0.0))
        if (then, level) > highest:
            worst, highest = key, (then, level)
    return Outlook(model.probability(features(levels, ahead)), levels, ahead, worst)


class NoForecast:
    """Foretells nothing."""

    @property
    def keeps(self) -> bool:
        """Returns False: no state is kept."""
        return False

    @property
    def kept(self) -> Sequence[int]:
        """Returns no steps."""
        return ()

    def set_run(self, choices: Mapping[str, str], optimizer: Mapping[str, Any]) -> None:
        """Does nothing."""
        del choices, optimizer

    def add_loss(self, loss: float) -> None:
        """Does nothing."""
        del loss

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Prediction]:
        """Returns no predictions."""
        del step, metrics
        return []

    def keep(self, step: int) -> None:
        """Does nothing."""
        del step

    def state_dict(self) -> dict:
        """Empty: there is no state."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Does nothing."""
        del state


@dataclass
class Forecast(NoForecast):
    """Foretells trouble from the monitors' looks.

    Attributes:
        horizon: steps ahead.
        action: `alarm`, or `checkpoint`: the loop also keeps the state at the first alarm, whatever is deleted later.
    """

    horizon: int
    action: str
    _choices: Mapping[str, str] = field(init=False, repr=False, default_factory=dict)
    _optimizer: Mapping[str, Any] = field(init=False, repr=False, default_factory=dict)
    _kept: list[int] = field(init=False, repr=False, default_factory=list)
    _series: dict[str, list[list[float]]] = field(init=False, repr=False, default_factory=dict)
    _rates: list[float] = field(init=False, repr=False, default_factory=list)
    _since: int = field(init=False, repr=False, default=0)
    _losses: list[float] = field(init=False, repr=False, default_factory=list)
    _sum: float = field(init=False, repr=False, default=0.0)
    _count: int = field(init=False, repr=False, default=0)
    _said: dict[str, list[float]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ConfigError(f"forecast.horizon={self.horizon} is below 1: use forecast=off for no forecast")
        if self.action not in ("alarm", "checkpoint"):
            raise ConfigError(f"forecast.action={self.action} is unknown: use alarm or checkpoint")

    @property
    def keeps(self) -> bool:
        """Whether the state at an alarm is kept."""
        return self.action == "checkpoint"

    @property
    def kept(self) -> Sequence[int]:
        """Returns the steps whose state is kept, at most `KEPT`."""
        return self._kept

    def keep(self, step: int) -> None:
        """Notes that the state after `step` steps is kept."""
        self._kept = [*[each for each in self._kept if each < step][: KEPT - 1], step]

    def set_run(self, choices: Mapping[str, str], optimizer: Mapping[str, Any]) -> None:
        """Sets what the fixes depend on, so that no fix names what the run already uses.

        Args:
            choices: the option of each config group.
            optimizer: the keys of the chosen optimizer; `lr` is the peak learning rate.
        """
        self._choices, self._optimizer = choices, optimizer

    def add_loss(self, loss: float) -> None:
        """Adds the loss of an applied step, in nats; the mean since the last look is what counts."""
        self._sum, self._count = self._sum + loss, self._count + 1

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Prediction]:
        """Adds a look, and returns what is to be said now: nothing, or a prediction about the worst signal.

        There is a prediction while the probability is at least the model's alarm: once for each signal, again after a
        horizon, and again if the time of the crossing has changed much.

        Args:
            step: of the look.
            metrics: of the look: `monitors/...`, `grad/norm`, `lr`, `precision/loss_scale`.
        """
        model = fitted()
        heights = self.heights(step, metrics)
        seen = outlook(heights, model)
        if seen.worst is None or seen.probability < model.alarm:
            return []
        found = self.predict(step, seen.worst, heights, seen.probability, model)
        if not self._is_news(found):
            return []
        self._said[found.signal] = [step, found.at]
        return [found]

    def predict(self, step: int, key: Key, heights: Heights, probability: float, model: Model) -> Prediction:
        """Returns the prediction about one signal."""
        signal = BY_NAME[key[0]]
        at = heights.crossings.get(key, math.nan)
        low, high = step + model.earliest * (at - step), step + model.latest * (at - step)
        fix = fixes(signal, self._choices, self._optimizer)
        found = Prediction(
            step,
            signal.name,
            key[1],
            signal.value(heights.now[key]),
            signal.threshold,
            at,
            low,
            high,
            probability,
            self.horizon,
            fix,
            "",
        )
        return replace(found, text=text_of(found, signal, heights.slopes.get(key, 0.0), model.healthy[signal.name]))

    def _is_news(self, found: Prediction) -> bool:
        """Whether a prediction has not been said yet, or differs much from what was."""
        if found.signal not in self._said:
            return True
        step, at = self._said[found.signal]
        if found.step - step >= self.horizon:
            return True
        left, before = found.at - found.step, at - found.step
        return left > 0 and not math.isnan(before) and not 1 / AGAIN <= before / left <= AGAIN

    def heights(self, step: int, metrics: Mapping[str, float]) -> Heights:
        """Adds a look, and returns the signals' heights.

        Args:
            step: of the look.
            metrics: of the look: `monitors/...`, `grad/norm`, `lr`, `precision/loss_scale`.
        """
        self._note_regime(step, metrics.get("lr", math.nan))
        seen = {**metrics, **self._loss_rise()}
        scaled = self._scaled(metrics.get("precision/loss_scale", 1.0))
        for signal in SIGNALS:
            if signal.name in ("loss_scale", "headroom") and not scaled:
                continue
            for place, value in signal.values(seen).items():
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
            now[name, place] = float(np.median([height for _, height in points[-SPREAD:]]))
        return Heights(now, *self._trends(now, step))

    def _note_regime(self, step: int, rate: float) -> None:
        """Notes when the learning rate begins to rise, stay or fall."""
        if math.isnan(rate):
            return
        self._rates = [*self._rates, rate][-3:]
        if len(self._rates) == 3:
            before, after = (
                int(np.sign(round(math.log(max(later, 1e-30) / max(earlier, 1e-30)), 6)))
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

    def _scaled(self, scale: float) -> bool:
        """Whether the loss is scaled, as in fp16: only then loss scale and headroom are signals."""
        return scale != 1.0 or "loss_scale|" in self._series

    def _trends(self, now: Mapping[Key, float], step: int) -> tuple[dict[Key, float], ...]:
        """Returns heights at the end of the horizon, steps of crossing, and slopes, of the series with a trend."""
        groups: dict[tuple[float, ...], list[Key]] = {}
        for key in now:
            points = self._in_regime(*key)
            if len(points) >= LEAST and all(math.isfinite(height) for _, height in points):
                groups.setdefault(tuple(each for each, _ in points), []).append(key)
        later, crossings, slopes = {}, {}, {}
        for steps, keys in groups.items():
            heights = np.array([[height for _, height in self._in_regime(*key)] for key in keys])
            line = trends(np.array(steps), heights)
            for number, key in enumerate(keys):
                slope = float(line.slope[number]) if line.low[number] > 0 else 0.0
                height = float(line.value[number]) + slope * (step - steps[-1])
                later[key], slopes[key] = height + slope * self.horizon, slope
                signal = BY_NAME[key[0]]
                left = signal.height(signal.threshold) - height
                if slope > 0 and left > 0:
                    crossings[key] = step + left / slope
        return later, crossings, slopes

    def _in_regime(self, name: str, place: str) -> list[list[float]]:
        """Returns the points of a series since the last change of regime."""
        return [point for point in self._series[f"{name}|{place}"] if point[0] >= self._since]

    def cumulative_state(self) -> dict:
        """What a rollback does not undo: what was said, so that it is not said twice, and the kept steps."""
        return {"said": {name: list(said) for name, said in self._said.items()}, "kept": list(self._kept)}

    def load_cumulative_state(self, state: dict) -> None:
        """Restores it."""
        self._said = {name: list(said) for name, said in state.get("said", {}).items()}
        self._kept = list(state.get("kept", []))

    def state_dict(self) -> dict:
        """The series of the last looks."""
        return {
            "series": {name: [list(point) for point in points] for name, points in self._series.items()},
            "rates": list(self._rates),
            "since": self._since,
            "losses": list(self._losses),
            "sum": self._sum,
            "count": self._count,
            **self.cumulative_state(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores them. A checkpoint of a run without a forecast has none."""
        self._series = {name: [list(p) for p in points] for name, points in state.get("series", {}).items()}
        self._rates, self._since = list(state.get("rates", [])), state.get("since", 0)
        self._losses = list(state.get("losses", []))
        self._sum, self._count = state.get("sum", 0.0), state.get("count", 0)
        self.load_cumulative_state(state)
