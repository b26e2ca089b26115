"""Ranks the arms: first those that held, then those that did not, then those that broke; each tier by paired loss.

The losses of two arms are compared on the batches that both have read after the trouble (`statistics.py`). The
differences are to `nothing`, or to the arm with the lowest validation loss if `nothing` broke or its trouble came back.
An arm whose difference to the first one has an interval with 0 in it is not told apart from it. Of the arms that are
not told apart, those for which the forecast has named the fewest signals are preferred: a precursor can show before the
loss does. Of these, `nothing` is taken if it is among them, else the first.

An arm has not held if the trouble came back. A loss can also jump without a step that the guard skips, and stay there.
So an arm has not held either if its loss is above the best by more than a tenth of what the best arm has learnt.

If the arms were repeated with other seeds, an arm is compared with the others of the same seed, it has held only if it
has held with every seed, and the differences of the seeds are pooled.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stabletrain.beside.comparison.intervals import Interval
from stabletrain.beside.whatif.arms import NOTHING
from stabletrain.beside.whatif.outcome import Outcome
from stabletrain.beside.whatif.statistics import differences as differences
from stabletrain.beside.whatif.statistics import interval, paired

HELD, NOT_HELD, BROKE = range(3)
"""The tiers."""

NO_INTERVAL = Interval(math.nan, -math.inf, math.inf, 0)


LOST_SHARE = 0.1
"""An arm whose loss is above the best by more than this share of what the best has learnt has not held."""


@dataclass(frozen=True)
class RankedArm:
    """An arm in its place.

    Attributes:
        outcome: how it ended, with the run's own seed.
        behind_best: how far its loss is above that of the best arm, in words, if it has lost what was learnt.
        difference: of its losses to those of the reference, in nats per target; negative is better.
        behind: of its losses to those of the first arm.
        tied: whether it is not told apart from the first arm, or is the first.
        repeats: by seed, the run's own first: the arm among those with this seed; empty if it was not repeated.
    """

    outcome: Outcome
    behind_best: str
    difference: Interval
    behind: Interval = NO_INTERVAL
    tied: bool = False
    repeats: Mapping[int, "RankedArm"] = field(default_factory=dict)

    @property
    def tier(self) -> int:
        """`HELD`, `NOT_HELD` or `BROKE`."""
        return BROKE if self.broke else NOT_HELD if self.trouble else HELD

    @property
    def broke(self) -> str:
        """Where and why it broke, with the first seed with which it did; empty if it did not."""
        for outcome, seed in self._each:
            if outcome.broke:
                return f"broke at step {outcome.step:,}{seed}: {outcome.reason}"
        return ""

    @property
    def trouble(self) -> str:
        """Why an arm that did not break has not held; empty if it has."""
        came_back = [f"came back{seed}: {outcome.came_back}" for outcome, seed in self._each if outcome.came_back]
        behind = [f"{each.behind_best} with seed {seed}" for seed, each in self.repeats.items() if each.behind_best]
        return "; ".join(filter(None, (*came_back, *(behind or [self.behind_best]))))

    @property
    def forecasts(self) -> tuple[str, ...]:
        """Signals that the forecast has named since the start, with any seed."""
        return tuple(dict.fromkeys(name for outcome, _ in self._each for name in outcome.forecasts))

    @property
    def val_loss(self) -> float:
        """The validation loss at the end, the mean over the seeds; NaN if it was not evaluated with each of them."""
        return sum(outcome.val_loss for outcome, _ in self._each) / len(self._each)

    @property
    def _each(self) -> list[tuple[Outcome, str]]:
        """How it ended with each seed, and the words that name the seed."""
        return [(each.outcome, f" with seed {seed}") for seed, each in self.repeats.items()] or [(self.outcome, "")]


@dataclass(frozen=True)
class Ranking:
    """All arms in their order.

    Attributes:
        places: best first.
        reference: name of the arm to which the differences are; empty if every arm broke.
        winner: name of the arm to go on with; empty if every arm broke.
        without_forecast: name of the arm that would be the winner if forecasts did not count.
    """

    places: tuple[RankedArm, ...]
    reference: str
    winner: str
    without_forecast: str = ""

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
            why = self._by_forecast(first)
            return f"Too close to call: {', '.join([self.winner, *others])}. Taken: {self.winner}{why}{came_back}."
        if len([each for each in self.places if not each.broke]) == 1:
            return f"{self.winner} is the only arm that holds{came_back}."
        later = (lead_text(each) for each in self.places if not each.tied and 0 < each.behind.low < math.inf)
        return f"{self.winner} is best{next(later, '')}{came_back}."

    def _by_forecast(self, first: RankedArm) -> str:
        """Says that the forecast has decided between arms that are not told apart; empty if it has not."""
        if self.without_forecast in ("", self.winner):
            return ""
        other = next(each for each in self.places if each.outcome.arm.name == self.without_forecast)
        few, many = len(first.forecasts), len(other.forecasts)
        return (
            f", for which the forecast named {few or 'no'} signal{'s' * (few != 1)} ({self.without_forecast}: {many})"
        )


def lead_text(next_one: RankedArm) -> str:
    """Says how far an arm is behind the first."""
    mean, low, high, _ = next_one.behind
    return f", ahead of {next_one.outcome.arm.name} by {mean:.4f} ({low:.4f} to {high:.4f})"


def rank(
    outcomes: Sequence[Outcome],
    place: int,
    first_loss: float = math.nan,
    others: Mapping[int, Sequence[Outcome]] | None = None,
    seed: int = 0,
) -> Ranking:
    """Ranks arms.

    Args:
        outcomes: of the arms.
        place: position in the data from which on batches are compared.
        first_loss: of the run's first steps, from which on it has learnt; NaN if not known.
        others: by seed, the outcomes of the same arms with other seeds, in the same order.
        seed: of the run.
    """
    seeds = {seed: outcomes, **(others or {})}
    names = [each.arm.name for each in outcomes]
    losses = {
        number: {name: each.after(place) for name, each in zip(names, found, strict=True)}
        for number, found in seeds.items()
    }
    broke = {name for found in seeds.values() for name, each in zip(names, found, strict=True) if each.broke}
    alive = [name for name in names if name not in broke]
    reference = choose_reference(alive, seeds.values())
    intervals = {
        number: {name: paired(found[name], found[reference]) if alive else NO_INTERVAL for name in names}
        for number, found in losses.items()
    }
    lost = {
        number: worse_than_best({name: intervals[number][name].mean for name in alive}, found, first_loss)
        for number, found in losses.items()
    }

    def pooled(name: str, other: str) -> Interval:
        return (
            interval(*(differences(found[name], found[other]) for found in losses.values())) if other else NO_INTERVAL
        )

    found = []
    for number, name in enumerate(names):
        alone = {
            each: RankedArm(arms[number], lost[each].get(name, ""), intervals[each][name])
            for each, arms in seeds.items()
        }
        repeats = alone if len(seeds) > 1 else {}
        found.append(replace(alone[seed], difference=pooled(name, reference), repeats=repeats))
    if not alive:
        return Ranking(tuple(found), "", "")

    def key(each: RankedArm) -> tuple[int, float]:
        return each.tier, math.inf if math.isnan(each.difference.mean) else each.difference.mean

    order = sorted(found, key=key)
    first = order[0]
    places = []
    for each in order:
        behind = pooled(each.outcome.arm.name, first.outcome.arm.name)
        tied = each is first or (each.tier == first.tier and not behind.excludes_zero)
        places.append(replace(each, behind=behind, tied=tied))
    tied = [each for each in places if each.tied]
    fewest = min(len(each.forecasts) for each in tied)
    preferred = [each for each in tied if len(each.forecasts) == fewest]
    return Ranking(tuple(places), reference, nothing_or_first(preferred), nothing_or_first(tied))


def nothing_or_first(arms: Sequence[RankedArm]) -> str:
    """Returns the name of the first arm, or `nothing` if it is among them."""
    names = [each.outcome.arm.name for each in arms]
    return NOTHING if NOTHING in names else names[0]


def worse_than_best(
    means: Mapping[str, float], losses: Mapping[str, Mapping[int, float]], first_loss: float
) -> dict[str, str]:
    """Returns the arms that are worse than the best by more than `LOST_SHARE` of what that has learnt, and by how much.

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
        if name != best and mean - known[best] > LOST_SHARE * max(learnt, 0.0)
    }


def choose_reference(alive: Sequence[str], seeds: Iterable[Sequence[Outcome]]) -> str:
    """Returns the arm to which the others are compared: `nothing`, or else the one with the lowest validation loss.

    An arm whose trouble came back is taken only if no other is left: its rollbacks have skipped the batches on which
    the others are compared.

    Args:
        alive: names of the arms that did not break.
        seeds: the outcomes of all arms, for each seed.
    """
    seeds = [*seeds]
    came_back = {each.arm.name for found in seeds for each in found if each.came_back}
    alive = [name for name in alive if name not in came_back] or alive
    if NOTHING in alive or not alive:
        return NOTHING if alive else ""
    sums = dict.fromkeys(alive, 0.0)
    for found in seeds:
        for each in found:
            if each.arm.name in sums:
                sums[each.arm.name] += math.inf if math.isnan(each.val_loss) else each.val_loss
    return min(sums, key=sums.__getitem__)


def to_reference(ranked: RankedArm, reference: Outcome, place: int) -> RankedArm:
    """Returns an arm of the first round with its difference to the reference of the last one, and no tie.

    Args:
        ranked: the arm.
        reference: how the reference ended.
        place: position in the data from which on the first round compared batches.
    """
    return replace(ranked, difference=paired(ranked.outcome.after(place), reference.after(place)), tied=False)


def finalists(ranking: Ranking, count: int) -> list[str]:
    """Returns the names of the arms that go on: the first `count` that did not break, and `nothing` if it did not."""
    alive = [each.outcome.arm.name for each in ranking.places if not each.broke]
    return [name for number, name in enumerate(alive) if number < count or name == NOTHING]
