"""From the signals' heights to the probability of trouble."""

from collections.abc import Mapping
from dataclasses import dataclass

from stabletrain.beside.forecast.model import Model, features
from stabletrain.beside.forecast.series import Heights, Key
from stabletrain.beside.forecast.signals import BY_NAME


@dataclass(frozen=True)
class Outlook:
    """What a model makes of one look's heights.

    Attributes:
        probability: that the run breaks or ends worse.
        levels, ahead: of each signal that counts, the highest of its places; see `model.py`.
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
        if not signal.counts:
            continue
        level = signal.level(height, healthy)
        then = max(level, signal.level(heights.later.get(key, height), healthy))
        levels[signal.name] = max(level, levels.get(signal.name, 0.0))
        ahead[signal.name] = max(then, ahead.get(signal.name, 0.0))
        if (then, level) > highest:
            worst, highest = key, (then, level)
    return Outlook(model.probability(features(levels, ahead)), levels, ahead, worst)
