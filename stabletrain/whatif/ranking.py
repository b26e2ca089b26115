"""Ranks the arms: those that held, those whose trouble came back, those that broke; within each by paired loss.

The losses of two arms are compared on the batches that both have read after the trouble (`statistics.py`). The
differences are to `nothing`, or to the arm with the lowest validation loss if `nothing` broke. An arm whose difference
to the first one has an interval with 0 in it is not told apart from it. Of the arms that are not told apart, `nothing`
is taken if it is among them, else the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stabletrain.whatif.arms import NOTHING
from stabletrain.whatif.outcome import Outcome
from stabletrain.whatif.statistics import Interval, paired

HELD, CAME_BACK, BROKE = range(3)
"""The tiers."""


@dataclass(frozen=True)
class Ranked:
    """An arm in its place.

    Attributes:
        outcome: how it ended.
        difference: of its losses to those of the reference, in nats per target; negative is better.
        behind: of its losses to those of the first arm.
        tied: whether it is not told apart from the first arm, or is the first.
    """

    outcome: Outcome
    difference: Interval
    behind: Interval
    tied: bool


@dataclass(frozen=True)
class Ranking:
    """All arms in their order.

    Attributes:
        places: best first.
        reference: name of the arm to which the differences are; empty if every arm broke.
        winner: name of the arm to go on with; empty if every arm broke.
    """

    places: tuple[Ranked, ...]
    reference: str
    winner: str

    @property
    def tied(self) -> list[str]:
        """Names of the arms that are not told apart from the first, and the first; empty if every arm broke."""
        return [each.outcome.arm.name for each in self.places if each.tied] if self.winner else []

    @property
    def verdict(self) -> str:
        """Who won, in a sentence."""
        if not self.winner:
            return "No arm holds: each of them broke."
        first = next(each for each in self.places if each.outcome.arm.name == self.winner)
        others = [name for name in self.tied if name != self.winner]
        came_back = f", although its trouble came back ({first.outcome.came_back})" if first.outcome.came_back else ""
        if others:
            return f"Too close to call: {', '.join([self.winner, *others])}. Taken: {self.winner}{came_back}."
        if len([each for each in self.places if not each.outcome.broke]) == 1:
            return f"{self.winner} is the only arm that holds{came_back}."
        second = self.places[1]
        ahead = "" if second.outcome.tier > first.outcome.tier else lead(second)
        return f"{self.winner} is best{ahead}{came_back}."


def lead(second: Ranked) -> str:
    """Says how far the second arm is behind the first."""
    mean, low, high, _ = second.behind
    return f", ahead of {second.outcome.arm.name} by {mean:.4f} ({low:.4f} to {high:.4f})"


def rank(outcomes: Sequence[Outcome], place: int) -> Ranking:
    """Ranks arms.

    Args:
        outcomes: of the arms.
        place: position in the data from which on batches are compared.
    """
    losses = {each.arm.name: each.after(place) for each in outcomes}
    alive = [each for each in outcomes if each.tier < BROKE]
    if not alive:
        none = Interval(math.nan, -math.inf, math.inf, 0)
        return Ranking(tuple(Ranked(each, none, none, False) for each in outcomes), "", "")
    reference = reference_of(alive)
    differences = {each.arm.name: paired(losses[each.arm.name], losses[reference]) for each in outcomes}

    def key(each: Outcome) -> tuple[int, float]:
        mean = differences[each.arm.name].mean
        return each.tier, math.inf if math.isnan(mean) else mean

    order = sorted(outcomes, key=key)
    first = order[0]
    places = []
    for each in order:
        behind = paired(losses[each.arm.name], losses[first.arm.name])
        tied = each is first or (each.tier == first.tier and not behind.excludes_zero)
        places.append(Ranked(each, differences[each.arm.name], behind, tied))
    names = [each.outcome.arm.name for each in places if each.tied]
    return Ranking(tuple(places), reference, NOTHING if NOTHING in names else first.arm.name)


def reference_of(alive: Sequence[Outcome]) -> str:
    """Returns the arm to which the others are compared: `nothing`, or else the one with the lowest validation loss."""
    names = [each.arm.name for each in alive]
    if NOTHING in names:
        return NOTHING
    return min(alive, key=lambda each: (each.tier, math.inf if math.isnan(each.val_loss) else each.val_loss)).arm.name


def to_reference(ranked: Ranked, reference: Outcome, place: int) -> Ranked:
    """Returns an arm of the first heat with its difference to the reference of the last one, and no tie.

    Args:
        ranked: the arm.
        reference: how the reference ended.
        place: position in the data from which on the first heat compared batches.
    """
    difference = paired(ranked.outcome.after(place), reference.after(place))
    return replace(ranked, difference=difference, tied=False)


def finalists(ranking: Ranking, count: int) -> list[str]:
    """Returns the names of the arms that go on: the first `count` that did not break, and `nothing` if it did not."""
    alive = [each.outcome.arm.name for each in ranking.places if not each.outcome.broke]
    return [name for number, name in enumerate(alive) if number < count or name == NOTHING]
