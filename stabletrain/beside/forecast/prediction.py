"""What a forecast says about one signal, as one line."""

import math

from stabletrain.beside.forecast.signals import Signal
from stabletrain.extension import Prediction


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
