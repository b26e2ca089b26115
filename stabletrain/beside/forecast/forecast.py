"""Predicts trouble: when a signal of the monitors reaches its threshold, and how likely the run breaks or ends worse.

Each look of the monitors adds to the series of the signals (`series.py`); a model makes a probability of them
(`model.py`); above the model's alarm there is a prediction about the worst signal.
After a rollback the series are those of the restored state. The room only reads: it returns predictions, the loop acts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stabletrain.beside.forecast.distance import distance, helps_from_afar, slower
from stabletrain.beside.forecast.model import Model, fitted, outlook
from stabletrain.beside.forecast.series import Heights, Key, Series
from stabletrain.beside.forecast.signals import BY_NAME, fixes, text_of
from stabletrain.errors import ConfigError
from stabletrain.extension import NoForecast, Prediction

NEVER = (math.inf, -math.inf)
"""An interval that no step is in."""

KEPT = 2
"""States kept at most: those of the first and of the newest alarm."""


@dataclass
class Forecast(NoForecast):
    """Predicts trouble from what the monitors measure.

    Attributes:
        horizon: steps ahead.
        action: `alarm`, or `checkpoint`: the loop also keeps the state at the first alarm, whatever is deleted later.
    """

    horizon: int
    action: str
    _choices: Mapping[str, str] = field(init=False, repr=False, default_factory=dict)
    _optimizer: Mapping[str, Any] = field(init=False, repr=False, default_factory=dict)
    _too_high: float = field(init=False, repr=False, default=1.0)
    _kept: list[int] = field(init=False, repr=False, default_factory=list)
    _series: Series = field(init=False, repr=False)
    _said: dict[str, list[float]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ConfigError(f"forecast.horizon={self.horizon} is below 1: use forecast=off for no forecast")
        if self.action not in ("alarm", "checkpoint"):
            raise ConfigError(f"forecast.action={self.action} is unknown: use alarm or checkpoint")
        self._series = Series(self.horizon)

    @property
    def keeps(self) -> bool:
        """Whether the action is to keep the state at an alarm."""
        return self.action == "checkpoint"

    @property
    def kept(self) -> Sequence[int]:
        """Steps whose state is kept, at most `KEPT`."""
        return self._kept

    def keep(self, step: int) -> None:
        """Notes that the state after `step` steps is kept."""
        self._kept = [*[each for each in self._kept if each < step][: KEPT - 1], step]

    def set_run(self, choices: Mapping[str, str], optimizer: Mapping[str, Any], usual_lr: float | None = None) -> None:
        """Sets what the fixes depend on."""
        self._choices, self._optimizer = choices, optimizer
        rate = optimizer.get("lr")
        self._too_high = rate / usual_lr if usual_lr and isinstance(rate, int | float) else 1.0

    @property
    def distance(self) -> str:
        """What the run has that no recorded run had (`distance.py`); empty if nothing."""
        return distance(self._choices)

    def add_loss(self, loss: float) -> None:
        """Adds the loss of an applied step; the mean since the last look is what counts."""
        self._series.add_loss(loss)

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Prediction]:
        """Adds a look, and returns the predictions to print now: none, or one about the worst signal.

        There is a prediction while the probability is at least the model's alarm: once for each signal, again after a
        horizon, and again if the crossing becomes known or is no longer in the interval that was said. There is none
        from a value that is not finite.
        """
        model = fitted()
        heights = self.heights(step, metrics)
        seen = outlook(heights, model)
        if seen.worst is None or seen.probability < model.alarm:
            return []
        if not math.isfinite(
            heights.now[seen.worst]
        ):  # the trouble is here; the guard sees it, and its cause is looked for
            return []
        found = self.predict(step, seen.worst, heights, seen.probability, model)
        if not self._is_news(found):
            return []
        known = not math.isnan(found.at)
        self._said[found.signal] = [step, *((found.low, found.high) if known else NEVER)]
        return [found]

    def heights(self, step: int, metrics: Mapping[str, float]) -> Heights:
        """Adds a look, and returns the signals' heights; see `Series.add`."""
        return self._series.add(step, metrics)

    def predict(self, step: int, key: Key, heights: Heights, probability: float, model: Model) -> Prediction:
        """Returns the prediction about one signal."""
        signal = BY_NAME[key[0]]
        at = heights.crossings.get(key, math.nan)
        low, high = step + model.earliest * (at - step), step + model.latest * (at - step)
        lower, far = slower(heights, model, self._too_high), self.distance
        fix = fixes(signal, self._choices, self._optimizer, lower)
        if far:
            fix = tuple(each for each in fix if helps_from_afar(each, heights, model, lower))
        found = Prediction(
            step,
            signal.name,
            key[1],
            signal.value(heights.now[key]),
            signal.threshold,
            at,
            low,
            high,
            math.nan if far else probability,
            self.horizon,
            fix,
            "",
        )
        return replace(
            found, text=text_of(found, signal, heights.slopes.get(key, 0.0), model.healthy[signal.name], far)
        )

    def _is_news(self, found: Prediction) -> bool:
        """Whether a prediction has not been said yet, or differs much from what was."""
        if found.signal not in self._said:
            return True
        step, low, high = self._said[found.signal]
        return found.step - step >= self.horizon or found.at < low or found.at > high

    def cumulative_state(self) -> dict:
        """What a rollback does not undo: what was said, so that it is not said twice, and the kept steps."""
        return {"said": {name: list(said) for name, said in self._said.items()}, "kept": list(self._kept)}

    def load_cumulative_state(self, state: dict) -> None:
        """Restores it."""
        self._said = {name: list(said) for name, said in state.get("said", {}).items()}
        self._kept = list(state.get("kept", []))

    def state_dict(self) -> dict:
        """The series of the last looks, and what a rollback does not undo."""
        return {**self._series.state_dict(), **self.cumulative_state()}

    def load_state_dict(self, state: dict) -> None:
        """Restores them. A checkpoint of a run without a forecast has none."""
        self._series.load_state_dict(state)
        self.load_cumulative_state(state)
