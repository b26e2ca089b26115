"""What a forecast says about one signal, as numbers and as one line."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from stabletrain.forecast.signals import Signal


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
