"""Other ways to compute one number from the same signals, tried beside the forecast's model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from stabletrain.beside.forecast.model import Model
from stabletrain.beside.forecast.signals import SIGNALS
from tests.reliability.foresight.fit import logistic, probabilities, samples
from tests.reliability.foresight.looks import Watched
from tests.reliability.foresight.score import EARLIEST, LATEST, Scores

NAMES = [signal.name for signal in SIGNALS]


def highest_level(fitting: Sequence[Watched], runs: Sequence[Watched], model: Model) -> Scores:
    """Returns the highest level of all signals: a rule with no weights."""
    del fitting
    return {each.run.name: np.array([max(one.levels.values()) for one in each.outlooks(model)]) for each in runs}


def levels_only(fitting: Sequence[Watched], runs: Sequence[Watched], model: Model) -> Scores:
    """Returns a logistic model without what lies ahead: no trends."""
    values, labels, weights = samples(fitting, model)
    columns = [0, 1, 2, 5]
    bias, *found = logistic(values[:, columns], labels, weights)
    slopes = np.zeros(values.shape[1])
    slopes[columns] = found
    other = replace(model, bias=float(bias), weights=tuple(float(w) for w in slopes))
    return {each.run.name: probabilities(each, other) for each in runs}


def by_signal(fitting: Sequence[Watched], runs: Sequence[Watched], model: Model) -> Scores:
    """Returns a logistic model with weights of its own for each signal, now and ahead."""

    def rows(each: Watched) -> np.ndarray:
        return np.array(
            [
                [*(one.levels.get(name, 0.0) for name in NAMES), *(one.ahead.get(name, 0.0) for name in NAMES)]
                for one in each.outlooks(model)
            ]
        )

    values, labels, weights = [], [], []
    for each in fitting:
        broke = np.inf if each.run.broke is None else each.run.broke
        kept = [
            (row, each.run.worse or broke - step <= EARLIEST)
            for step, row in zip(each.steps, rows(each), strict=True)
            if step <= broke - LATEST
        ]
        values += [row for row, _ in kept]
        labels += [float(label) for _, label in kept]
        weights += [1 / len(kept)] * len(kept)
    bias, *found = logistic(np.array(values), np.array(labels), np.array(weights))
    return {each.run.name: bias + rows(each) @ np.array(found) for each in runs}


def sequential(fitting: Sequence[Watched], runs: Sequence[Watched], model: Model) -> Scores:
    """Returns a sequential test: the sum of the log-odds so far, reset at 0 (CUSUM of the forecast's probability)."""
    del fitting
    found = {}
    for each in runs:
        total, sums = 0.0, []
        for p in np.clip(probabilities(each, model), 1e-6, 1 - 1e-6):
            total = max(0.0, total + float(np.log(p / (1 - p))))
            sums.append(total)
        found[each.run.name] = np.array(sums)
    return found


OTHERS: dict[str, Callable[[Sequence[Watched], Sequence[Watched], Model], Scores]] = {
    "other: highest level": highest_level,
    "other: no trends": levels_only,
    "other: a weight for each signal": by_signal,
    "other: sequential test": sequential,
}
