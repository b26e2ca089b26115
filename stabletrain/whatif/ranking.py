"""Ranks the arms: those that held, those that did not, those that broke; within each by paired loss.

The losses of two arms are compared on the batches that both have read after the trouble (`statistics.py`). The
differences are to `nothing`, or to the arm with the lowest validation loss if `nothing` broke. An arm whose difference
to the first one has an interval with 0 in it is not told apart from it. Of the arms that are not told apart, `nothing`
is taken if it is among them, else the first.

An arm has not held if the trouble came back. A loss can also jump without a step that the guard skips, and stay there.
So an arm has not held either if its loss is above the best by more than a tenth of what the best arm has learnt.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stabletrain.whatif.arms import NOTHING
from stabletrain.whatif.outcome import Outcome
from stabletrain.whatif.statistics import Interval, paired

HELD, NOT_HELD, BROKE = range(3)
"""The tiers."""

NO_INTERVAL = Interval(math.nan, -math.inf, math.inf, 0)


SHARE = 0.1
"""Share of what the best arm has learnt by which an arm that has held may be worse."""


@dataclass(frozen=True)
class Ranked:
    """An arm in its place.

    Attributes:
        outcome: how it ended.
        behind_best: how far its loss is above that of the best arm, in words, if it has lost what was learnt.
        difference: of its losses to those of the reference, in nats per target; negative is better.
        behind: of its losses to those of the first arm.
        tied: whether it is not told apart from the first arm, or is the first.
    """

    outcome: Outcome
    behind_best: str
    difference: Interval
    behind: Interval
    tied: bool

    @property
    def tier(self) -> int:
        """`HELD`, `NOT_HELD` or `BROKE`."""
        return BROKE if self.outcome.broke else NOT_HELD if self.trouble else HELD

    @property
    def trouble(self) -> str:
        """Why an arm that did not break has not held; empty if it has."""
        came_back = f"came back: {self.outcome.came_back}" if self.outcome.came_back else ""
        return "; ".join(filter(None, (came_back, self.behind_best)))


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
        came_back = f", although it has not held ({first.trouble})" if first.trouble else ""
        if others:
            return f"Too close to call: {', '.join([self.winner, *others])}. Taken: {self.winner}{came_back}."
        if len([each for each in self.places if not each.outcome.broke]) == 1:
            return f"{self.winner} is the only arm that holds{came_back}."
        later = (lead(each) for each in self.places if not each.tied and 0 < each.behind.low < math.inf)
        ahead = next(later, "")
        return f"{self.winner} is best{ahead}{came_back}."


def lead(next_one: Ranked) -> str:
    """Says how far an arm is behind the first."""
    mean, low, high, _ = next_one.behind
    return f", ahead of {next_one.outcome.arm.name} by {mean:.4f} ({low:.4f} to {high:.4f})"


def rank(outcomes: Sequence[Outcome], place: int, first_loss: float = math.nan) -> Ranking:
    """Ranks arms.

    Args:
        outcomes: of the arms.
        place: position in the data from which on batches are compared.
        first_loss: of the run's first steps, from which on it has learnt; NaN if not known.
    """
    losses = {each.arm.name: each.after(place) for each in outcomes}
    alive = [each for each in outcomes if not each.broke]
    if not alive:
        return Ranking(tuple(Ranked(each, "", NO_INTERVAL, NO_INTERVAL, False) for each in outcomes), "", "")
    reference = reference_of(alive)
    differences = {each.arm.name: paired(losses[each.arm.name], losses[reference]) for each in outcomes}
    lost = too_high({each.arm.name: differences[each.arm.name].mean for each in alive}, losses, first_loss)
    found = [
        Ranked(
            each,
            lost.get(each.arm.name, ""),
            differences[each.arm.name],
            NO_INTERVAL,
            False,
        )
        for each in outcomes
    ]

    def key(each: Ranked) -> tuple[int, float]:
        return each.tier, math.inf if math.isnan(each.difference.mean) else each.difference.mean

    order = sorted(found, key=key)
    first = order[0]
    places = []
    for each in order:
        behind = paired(losses[each.outcome.arm.name], losses[first.outcome.arm.name])
        tied = each is first or (each.tier == first.tier and not behind.excludes_zero)
        places.append(replace(each, behind=behind, tied=tied))
    names = [each.outcome.arm.name for each in places if each.tied]
    return Ranking(tuple(places), reference, NOTHING if NOTHING in names else first.outcome.arm.name)


def too_high(
    means: Mapping[str, float], losses: Mapping[str, Mapping[int, float]], first_loss: float
) -> dict[str, str]:
    """Returns the arms that are worse than the best by more than `SHARE` of what that has learnt, and by how much.

    Args:
        means: by arm, the difference of its losses to those of the reference.
        losses: by arm and position in the data.
        first_loss: see `rank`.
    """
    known = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if not known or not math.isfinite(first_loss):
        return {}
    best = min(known, key=known.__getitem__)
    learnt = first_loss - sum(losses[best].values()) / len(losses[best])
    return {
        name: f"loss {mean - known[best]:.3g} above the best"
        for name, mean in known.items()
        if name != best and mean - known[best] > SHARE * max(learnt, 0.0)
    }


def reference_of(alive: Sequence[Outcome]) -> str:
    """Returns the arm to which the others are compared: `nothing`, or else the one with the lowest validation loss."""
    names = [each.arm.name for each in alive]
    if NOTHING in names:
        return NOTHING
    return min(alive, key=lambda each: math.inf if math.isnan(each.val_loss) else each.val_loss).arm.name


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
