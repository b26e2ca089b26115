"""The probability that a run breaks or ends worse: a logistic model of a few numbers, which can be printed.

    p = 1 / (1 + exp(-(bias + sum_i weight_i feature_i))),      weight_i >= 0

The features do not name a signal, so that a kind of trouble that the model was not fitted on counts as well. Every
feature grows with every level. `python -m tests.reliability.foresight fit` writes `model.json`, with a hash of its
data.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from stabletrain.beside.forecast.series import Heights, Key
from stabletrain.beside.forecast.signals import BY_NAME, level

FILE = Path(__file__).with_name("model.json")

FEATURES = ("highest_level", "second_level", "third_level", "highest_ahead", "second_ahead", "loss_level")
"""Levels of the signals now; levels at the end of the horizon, if trends go on; the level of the loss."""


def features(levels: Mapping[str, float], ahead: Mapping[str, float]) -> np.ndarray:
    """Returns the features `[6]`.

    Args:
        levels: the level of each signal now, the highest of its places.
        ahead: the same at the end of the horizon.
    """
    now = sorted((level for name, level in levels.items() if name != "loss"), reverse=True) + [0.0] * 3
    later = sorted((level for name, level in ahead.items() if name != "loss"), reverse=True) + [0.0] * 2
    return np.array([*now[:3], *later[:2], levels.get("loss", 0.0)])


@dataclass(frozen=True)
class Model:
    """A fitted model.

    Attributes:
        bias, weights: of the features, `[6]`; weights are not negative.
        healthy: the value of each signal up to which runs without trouble go.
        alarm: probability from which there is an alarm.
        earliest, latest: factors of the steps until a stated crossing: four of five crossings lie between them.
        data: hash of the recordings that it was fitted on.
    """

    bias: float
    weights: tuple[float, ...]
    healthy: Mapping[str, float]
    alarm: float
    earliest: float
    latest: float
    data: str

    def probability(self, values: np.ndarray) -> float:
        """Returns the probability for features `[6]`."""
        score = self.bias + float(np.dot(self.weights, values))
        return 1 / (1 + math.exp(-score)) if score > -700 else 0.0


@cache
def fitted() -> Model:
    """Returns the model that comes with the package."""
    read: dict[str, Any] = json.loads(FILE.read_text())
    read["weights"] = tuple(read["weights"])
    return Model(**read)


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
    spans = {name: BY_NAME[name].span(model.healthy[name]) for name in {name for name, _ in heights.now}}
    for key, height in heights.now.items():
        name = key[0]
        if not BY_NAME[name].counts:
            continue
        now = level(height, *spans[name])
        then = max(now, level(heights.later.get(key, height), *spans[name]))
        levels[name] = max(now, levels.get(name, 0.0))
        ahead[name] = max(then, ahead.get(name, 0.0))
        if (then, now) > highest:
            worst, highest = key, (then, now)
    return Outlook(model.probability(features(levels, ahead)), levels, ahead, worst)
