"""Chooses the peak learning rate from the losses of trials.

The noise of a loss is what rate and seed do not explain: with the loss of a trial as (part of its rate) + (part of its
seed) + noise, the residuals of the rates near the lowest loss give its standard deviation, as in a two-way analysis of
variance. It holds what initial weights and the order of the data do to a comparison of two rates, which the spread over
validation batches does not.

Rates whose loss is not told apart from the lowest one form the plateau. The proposed rate is its centre: near an end of
the plateau a small change of the run would leave it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stabletrain.beside.comparison.intervals import student

SHARE = 0.05
"""A loss is clearly above the lowest one if the difference is this share of what the lowest one has gained.

More than the noise of a trial: on the GPT and the ResNet of the docs that is 1 % of the gain. Less than what a rate
costs that is four times too high or too low, 6 % or more.
"""


@dataclass(frozen=True)
class Trial:
    """A short run at one learning rate.

    Attributes:
        rate: its peak learning rate.
        seed: of its weights and its data.
        steps: its length.
        first: the training loss of its first step.
        loss: its validation loss at the end; infinite if a loss was not finite.
        done: number of steps done: fewer than `steps` if a loss was not finite.
        seconds: it took.
    """

    rate: float
    seed: int
    steps: int
    first: float
    loss: float
    done: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """The trials at one rate.

    Attributes:
        rate: the rate.
        loss: mean over the seeds; infinite if it diverged at any of them.
        error: standard error of the mean, from the noise of all rates; NaN if there is a single seed.
        above: the difference to the lowest loss.
        margin: half the 95 % interval of this difference; NaN if there is a single seed.
        on_plateau: whether the rate belongs to the plateau.
    """

    rate: float
    loss: float
    error: float
    above: float
    margin: float
    on_plateau: bool

    @property
    def told_apart(self) -> bool:
        """Whether the loss is above the lowest one by more than the noise."""
        return not self.above <= (0.0 if math.isnan(self.margin) else self.margin)


def clearly_above(loss: float, lowest: float, first: float) -> bool:
    """Returns whether a loss is clearly above the lowest one, by the gain since the first step; see `SHARE`."""
    return loss > lowest and (math.isinf(loss) or loss - lowest >= SHARE * (first - lowest))


def by_rate(trials: Sequence[Trial]) -> dict[float, float]:
    """Returns the mean loss at each rate, by increasing rate; infinite if one of its trials diverged."""
    rates = sorted({trial.rate for trial in trials})
    return {rate: statistics.fmean(each.loss for each in trials if each.rate == rate) for rate in rates}


def noise(losses: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Returns the standard deviation of a loss, and its degrees of freedom; NaN and 0 if there are too few.

    Args:
        losses: finite, `[rates][seeds]`.
    """
    table = np.array(losses, np.float64)
    degrees = (table.shape[0] - 1) * (table.shape[1] - 1) if table.ndim == 2 else 0
    if degrees < 1:
        return math.nan, 0
    rest = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    return math.sqrt(float((rest**2).sum()) / degrees), degrees


def points(trials: Sequence[Trial]) -> list[Point]:
    """Returns the points of trials of one length, by increasing rate; every rate has the same seeds."""
    means = by_rate(trials)
    best = min(means, key=lambda rate: means[rate])
    lowest, first = means[best], statistics.fmean(trial.first for trial in trials)
    seeds = sorted({trial.seed for trial in trials})
    losses = {(trial.rate, trial.seed): trial.loss for trial in trials}
    # The noise grows with the rate, so only rates near the lowest loss count; two of them at least.
    order = [rate for rate in sorted(means, key=lambda rate: means[rate]) if math.isfinite(means[rate])]
    near = [rate for place, rate in enumerate(order) if place < 2 or not clearly_above(means[rate], lowest, first)]
    deviation, degrees = noise([[losses[rate, seed] for seed in seeds] for rate in near])
    error = deviation / math.sqrt(len(seeds))
    margin = student(degrees) * math.sqrt(2) * error if degrees else math.nan

    def point(rate: float, on_plateau: bool = False) -> Point:
        above = means[rate] - lowest if math.isfinite(means[rate]) else math.inf
        return Point(rate, means[rate], error, above, margin, on_plateau)

    # The plateau holds no gap: rates beyond one that is told apart do not belong to it.
    rates, plateau = [*means], {best}
    at = rates.index(best)
    for side in (reversed(rates[:at]), rates[at + 1 :]):
        for rate in side:
            if point(rate).told_apart:
                break
            plateau.add(rate)
    return [point(rate, rate in plateau) for rate in rates]


def centre(found: Sequence[Point]) -> float:
    """Returns the centre of the plateau on a logarithmic axis."""
    plateau = [point.rate for point in found if point.on_plateau]
    return math.sqrt(plateau[0] * plateau[-1])


def two_digits(rate: float) -> float:
    """Rounds a rate to two significant digits."""
    return float(f"{rate:.1e}")
