"""Chooses the rates to try: first a factor of 4 apart, then a factor of 2 apart around the lowest loss.

The first round needs no range. It starts around the configuration's rate, and goes on to higher and to lower rates
until the loss is clearly above the lowest one on both sides. Its trials have half the length and one seed, because
rates that are so far apart differ by more than the noise. The second round goes on until both ends are told apart from
the lowest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stabletrain.beside.rate_finder.peak import Point, Trial, by_rate, centre, clearly_above, points

COARSE, FINE = 4.0, 2.0
"""Factors between neighbouring rates in the two rounds."""

MOST_COARSE, MOST_FINE = 11, 6
"""Largest numbers of rates in the two rounds."""


@dataclass(frozen=True)
class Search:
    """What the trials have shown.

    Attributes:
        coarse, fine: the trials of the two rounds.
        points: of the second round, by increasing rate.
    """

    coarse: Sequence[Trial]
    fine: Sequence[Trial]
    points: Sequence[Point]

    @property
    def lowest(self) -> Point:
        """The point with the lowest loss."""
        return min(self.points, key=lambda point: point.loss)

    @property
    def first_round_best(self) -> float:
        """The rate with the lowest loss in the first round."""
        means = by_rate(self.coarse)
        return min(means, key=lambda rate: means[rate])

    @property
    def learns(self) -> bool:
        """Whether the lowest loss is below that of the first step."""
        return self.lowest.loss < min(trial.first for trial in self.fine)

    @property
    def peak(self) -> float:
        """The proposed rate, not rounded."""
        return centre(self.points)

    @property
    def open_below(self) -> bool:
        """Whether the plateau reaches the lowest rate of the second round."""
        return self.points[0].on_plateau

    @property
    def open_above(self) -> bool:
        """Whether the plateau reaches the highest rate of the second round."""
        return self.points[-1].on_plateau


def search(
    trial: Callable[[float, int, int], Trial], middle: float, low: float, high: float, steps: int, seeds: Sequence[int]
) -> Search:
    """Returns the trials at the rates that are needed, and the points of the second round.

    Args:
        trial: runs a trial of a rate, a seed and a number of steps.
        middle: the first rate.
        low, high: no rate outside of them is tried.
        steps: length of a trial of the second round.
        seeds: of the second round; the first round has the first of them.
    """
    coarse: dict[float, Trial] = {}

    def measure(rate: float) -> None:
        if rate not in coarse and low <= rate <= high:
            coarse[rate] = trial(rate, seeds[0], max(2, steps // 2))

    for rate in (middle, middle / COARSE, middle * COARSE):
        measure(rate)
    while len(coarse) < MOST_COARSE:
        wanted = [rate for rate in beyond_coarse(coarse) if low <= rate <= high]
        if not wanted:
            break
        measure(wanted[0])

    best = min(coarse, key=lambda rate: coarse[rate].loss)
    fine: list[Trial] = []
    found: list[Point] = []
    rates = [rate for rate in (best / FINE, best, best * FINE) if low <= rate <= high]
    while rates:
        fine += [trial(rate, seed, steps) for rate in rates for seed in seeds]
        found = points(fine)
        room = MOST_FINE - len(found)
        rates = [rate for rate in beyond_fine(found) if low <= rate <= high][: max(0, room)]
    return Search([*coarse.values()], fine, found)


def beyond_coarse(found: dict[float, Trial]) -> list[float]:
    """Returns the rates beyond the ends of the first round at which the loss may still be lower: higher rates first."""
    best = min(found.values(), key=lambda trial: trial.loss)
    low, high = found[min(found)], found[max(found)]
    wanted = []
    # If every loss is infinite, only lower rates can help.
    if math.isfinite(high.loss) and not clearly_above(high.loss, best.loss, best.first):
        wanted.append(high.rate * COARSE)
    if not clearly_above(low.loss, best.loss, best.first):
        wanted.append(low.rate / COARSE)
    return wanted


def beyond_fine(found: Sequence[Point]) -> list[float]:
    """Returns the rates beyond the ends of the second round that belong to the plateau."""
    if math.isinf(min(point.loss for point in found)):
        return [found[0].rate / FINE]
    ends = [(found[0], found[0].rate / FINE), (found[-1], found[-1].rate * FINE)]
    return [rate for end, rate in ends if end.on_plateau]
