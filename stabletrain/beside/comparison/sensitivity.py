"""Learning-rate sensitivity: how far the final loss is from the best one, on average over a grid of learning rates.

    sensitivity = mean over the grid of min(final validation loss, loss at init)  -  the lowest of these

A diverged run (it ended in NaN, or was halted) counts as its loss at init. The number alone can mislead: a model that
stays at chance at every rate scores 0. Always look at the curves too. Source: Wortsman et al., arXiv 2309.14322,
section 2.2.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stabletrain.beside.comparison.groups import SEED, setting_names
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.settings import setting_text, value_of
from stabletrain.printable import one_line

RATE = "optimizer.lr"
LOGIT = "monitors/attn_logit_max"


@dataclass(frozen=True)
class Point:
    """One run of a grid.

    Attributes:
        rate: peak learning rate.
        loss: the final validation loss, or the loss at init if that is lower or the run diverged.
        ended: the final validation loss; NaN if the run diverged.
        logit: largest attention logit that the monitors measured; NaN if they measured none.
        diverged: whether the run ended in NaN, or was halted.
    """

    rate: float
    loss: float
    ended: float
    logit: float
    diverged: bool


@dataclass(frozen=True)
class Arm:
    """The runs that share all settings except learning rate and seed.

    Attributes:
        name: the settings that distinguish the arm, such as `stability=qknorm`; `all` if there is only one arm.
        curves: for each seed, its points by increasing rate; fewer than the grid has if runs are missing.
        grid: all learning rates of the comparison, increasing.
        missing: one line for each run that does not exist or is not over.
    """

    name: str
    curves: Mapping[str, Sequence[Point]]
    grid: tuple[float, ...] = ()
    missing: list[str] = field(default_factory=list)

    def by_seed(self) -> dict[str, float]:
        """Returns the sensitivity of each seed whose grid is complete, in nats."""
        whole = {seed: curve for seed, curve in self.curves.items() if len(curve) == len(self.grid)}
        return {seed: sensitivity([point.loss for point in curve]) for seed, curve in whole.items()}

    def sensitivities(self) -> list[float]:
        """Returns the sensitivities of the seeds."""
        return [*self.by_seed().values()]

    def at(self, rate: float) -> list[Point]:
        """Returns the points at one learning rate, one per seed."""
        return [point for curve in self.curves.values() for point in curve if point.rate == rate]


def sensitivity(losses: Sequence[float]) -> float:
    """Returns the mean distance of the losses from the lowest one, in nats."""
    return statistics.fmean(losses) - min(losses)


def point(run: Run) -> Point | None:
    """Returns the point of a run, or None if the run is not over or never logged a loss."""
    start = run.initial_loss
    if run.status not in ("finished", "halted") or math.isnan(start):
        return None
    final = run.last("val/loss")
    return Point(
        rate=rate_of(run),
        loss=start if run.diverged else min(final, start),
        ended=math.nan if run.diverged else final,
        logit=run.highest(LOGIT),
        diverged=run.diverged,
    )


def arms(runs: Sequence[Run]) -> list[Arm]:
    """Groups runs into arms. A run that has no counterpart at another learning rate belongs to no arm.

    Of several runs with the same settings, the last one that is over counts.
    """
    sorted_runs = {
        name: seeds
        for name, seeds in grouped([run for run in runs if not math.isnan(rate_of(run))]).items()
        if any(len(seed) > 1 for seed in seeds.values())
    }
    # One grid for all arms: sensitivities are comparable only over the same learning rates.
    grid = tuple(sorted({rate for seeds in sorted_runs.values() for seed in seeds.values() for rate in seed}))
    found = []
    for name, seeds in sorted_runs.items():
        curves: dict[str, list[Point]] = {}
        missing = []
        for seed, by_rate in seeds.items():
            curves[seed] = []
            for rate in grid:
                run = by_rate.get(rate)
                this = None if run is None else point(run)
                if this is not None:
                    curves[seed].append(this)
                else:
                    where = f"{name}, {RATE}={rate:g}, {SEED}={seed}" if len(seeds) > 1 else f"{name}, {RATE}={rate:g}"
                    missing.append(f"{where}: {'no such run' if run is None else f'{run.folder} is {run.status}'}")
        found.append(Arm(name, {seed: curve for seed, curve in curves.items() if curve}, grid, missing))
    return found


def grouped(runs: Sequence[Run]) -> dict[str, dict[str, dict[float, Run]]]:
    """Groups runs by the settings that tell them apart, then by seed, then by learning rate."""
    found: dict[str, dict[str, dict[float, Run]]] = {}
    for run, name in zip(runs, setting_names(runs, but=(RATE, SEED)), strict=True):
        curve = found.setdefault(name, {}).setdefault(setting_text(value_of(run, SEED)), {})
        rate = rate_of(run)
        if rate not in curve or point(run) is not None:
            curve[rate] = run
    return found


def rate_of(run: Run) -> float:
    """Returns the peak learning rate of a run; NaN if it is unknown."""
    value = value_of(run, RATE)
    return float(value) if isinstance(value, int | float) else math.nan


def markdown(found: Sequence[Arm]) -> str:
    """Returns a Markdown table of the final losses per learning rate, and of each arm's sensitivity."""
    rates = found[0].grid
    head = [RATE, *(f"{rate:g}" for rate in rates), "sensitivity"]
    rows = [head, ["---"] * len(head)]
    for arm in found:
        rows.append([arm.name, *(cell(arm.at(rate)) for rate in rates), spread(arm.sensitivities())])
    if any(not math.isnan(point.logit) for arm in found for rate in rates for point in arm.at(rate)):
        rows.append(["*largest attention logit*", *[""] * (len(head) - 1)])
        for arm in found:
            largest = [max((point.logit for point in arm.at(rate)), default=math.nan) for rate in rates]
            rows.append([arm.name, *(f"{logit:.3g}" if logit == logit else "-" for logit in largest), ""])
    return "\n".join("| " + " | ".join(map(one_line, row)) + " |" for row in rows)


def cell(points: Sequence[Point]) -> str:
    """Formats the losses over the seeds, and how many of them diverged or ended above their loss at init."""
    if not points:
        return "-"
    diverged, above = sum(p.diverged for p in points), sum(p.ended > p.loss for p in points)
    notes = [f"{count} {what}" for count, what in ((diverged, "diverged"), (above, "above init")) if count]
    losses = spread([point.loss for point in points])
    return f"{losses} ({', '.join(notes)})" if notes else losses


def spread(values: Sequence[float]) -> str:
    """Formats the mean and standard deviation over the seeds; `incomplete` if no seed has its whole grid."""
    if not values:
        return "incomplete"
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"
