"""Fits the forecast's model: healthy values, weights, alarm threshold, and the interval of stated crossings."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
from scipy.optimize import minimize

from stabletrain.beside.forecast.model import FEATURES, Model, features
from stabletrain.beside.forecast.series import Key
from stabletrain.beside.forecast.signals import SIGNALS
from tests.reliability.foresight.looks import HORIZON, Watched
from tests.reliability.foresight.score import EARLIEST, LATEST, threshold_at

QUANTILE = 0.9
"""Share of the looks of runs without trouble that lie below a signal's healthy value."""

EXACT = {"ftol": 1e-14, "gtol": 1e-10, "maxiter": 10_000}
"""Of the search for the weights, so that their three digits do not depend on the library's version."""

PENALTY = 1e-3
"""Of the squared weights."""

RATE = 0.1
"""False alarms in 1,000 steps for which the alarm's threshold is chosen."""


def fit(runs: Sequence[Watched], others: Sequence[Watched] = ()) -> Model:
    """Returns a model fitted on `runs`; its threshold is chosen on those without an event, and on `others`."""
    quiet = [each for each in [*runs, *others] if not each.run.trouble]
    model = Model(0.0, (0.0,) * len(FEATURES), healthy(quiet), math.inf, 0.0, math.inf, data_of(runs))
    values, labels, weights = samples(runs, model)
    bias, *found = logistic(values, labels, weights)
    model = replace(model, bias=round(float(bias), 3), weights=tuple(round(float(w), 3) for w in found))
    alarm = threshold_at(RATE, quiet, {each.run.name: probabilities(each, model) for each in quiet})
    earliest, latest = interval_of_crossings(runs)
    return replace(model, alarm=math.ceil(alarm * 1e4) / 1e4, earliest=earliest, latest=latest)


def healthy(quiet: Sequence[Watched]) -> dict[str, float]:
    """Returns the value of each signal below which nearly all looks of runs without trouble lie."""
    found = {}
    looks = [highest(each.now) for run in quiet for each in run.heights]
    for signal in SIGNALS:
        heights = [look.get(signal.name, math.nan) for look in looks]
        finite = [height for height in heights if math.isfinite(height)]
        height = float(np.quantile(finite, QUANTILE)) if finite else signal.height(signal.threshold) - 1.0
        height = -height if signal.falls else height
        found[signal.name] = float(f"{math.exp(height) if signal.log else height:.3g}")
    return found


def highest(now: Mapping[Key, float]) -> dict[str, float]:
    """Returns the highest height of each signal over its places."""
    found: dict[str, float] = {}
    for (signal, _), height in now.items():
        found[signal] = max(found.get(signal, height), height)
    return found


def probabilities(each: Watched, model: Model) -> np.ndarray:
    """Returns the probability of trouble at each look."""
    return np.array([outlook.probability for outlook in each.outlooks(model)])


def samples(runs: Sequence[Watched], model: Model) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns features, labels and weights of all looks; every run weighs the same.

    The label is 1 within a horizon before a break, and at all looks of a run that ends worse. Looks after a break, and
    those so near that an alarm would be no hit, are left out.
    """
    values, labels, weights = [], [], []
    for each in runs:
        broke = math.inf if each.run.broke is None else each.run.broke
        kept = []
        for step, outlook in zip(each.steps, each.outlooks(model), strict=True):
            if step > broke - LATEST:
                break
            kept.append((features(outlook.levels, outlook.ahead), each.run.worse or broke - step <= EARLIEST))
        values += [value for value, _ in kept]
        labels += [float(label) for _, label in kept]
        weights += [1 / len(kept)] * len(kept)
    return np.array(values), np.array(labels), np.array(weights)


def logistic(values: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns bias and weights of a logistic regression with weights that are not negative."""
    signs, total = 2 * labels - 1, weights.sum()

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (parameters[0] + values @ parameters[1:])
        slope = -signs * weights / (1 + np.exp(np.clip(margins, -500, 500))) / total
        penalty = PENALTY * parameters[1:]
        value = (weights * np.logaddexp(0, -margins)).sum() / total + 0.5 * (penalty * parameters[1:]).sum()
        return value, np.concatenate([[slope.sum()], values.T @ slope + penalty])

    bounds = [(None, None)] + [(0, None)] * values.shape[1]
    return minimize(loss, np.zeros(values.shape[1] + 1), jac=True, bounds=bounds, method="L-BFGS-B", options=EXACT).x


def statements(each: Watched) -> dict[tuple[str, str], tuple[int, float]]:
    """Returns the first time stated for each signal and place: step of the look, and predicted steps until then.

    A time is stated when the threshold is predicted to be reached within the horizon.
    """
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for step, heights in zip(each.steps, each.heights, strict=True):
        for key, at in heights.crossings.items():
            if at - step <= HORIZON:
                found.setdefault(key, (step, at - step))
    return found


def ratios(runs: Iterable[Watched]) -> list[float]:
    """Returns actual over predicted steps until each stated crossing that came."""
    found = []
    for each in runs:
        for key, (step, left) in statements(each).items():
            if key in each.crossed and each.crossed[key] > step:
                found.append((each.crossed[key] - step) / max(left, 1.0))
    return found


def interval_of_crossings(runs: Sequence[Watched]) -> tuple[float, float]:
    """Returns the factors between which four of five stated crossings came."""
    found = ratios(runs)
    if not found:
        return 0.0, math.inf
    low, high = np.quantile(found, [0.1, 0.9])
    return float(f"{low:.2g}"), float(f"{high:.2g}")


def data_of(runs: Sequence[Watched]) -> str:
    """Returns a hash of the recordings' numbers."""
    found = hashlib.sha256()
    for each in sorted(runs, key=lambda one: one.run.name):
        found.update(each.run.name.encode() + np.ascontiguousarray(each.run.recording["signals"]).tobytes())
    return found.hexdigest()[:16]


def as_json(model: Model) -> str:
    """Returns the content of `model.json`."""
    return json.dumps(asdict(model), indent=1) + "\n"
