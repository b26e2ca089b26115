"""Sensitivity to the learning rate: how much a run loses, on average over a grid of rates, against the best of them.

    sensitivity = mean over the grid of min(final validation loss, loss at init)  -  the lowest of these

A run that ended in NaN, or was halted, counts as its loss at init. The number alone can deceive, for a model stuck at
chance at every rate scores 0: always look at the curves. Source: Wortsman et al., arXiv 2309.14322, section 2.2.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stabletrain.compare.reading.run import Run
from stabletrain.compare.reading.settings import enough, shown, telling, value_of

RATE, SEED = "optimizer.lr", "seed"
LOGIT = "monitors/attn_logit_max"


@dataclass(frozen=True)
class Point:
    """One run of a grid.

    Attributes:
        rate: peak learning rate.
        loss: what counts: the final validation loss, or the loss at init where that is lower or the run diverged.
        ended: the final validation loss; NaN where the run diverged.
        logit: largest attention logit that the monitors saw; NaN where they saw none.
        diverged: whether the run ended in NaN, or was halted.
    """

    rate: float
    loss: float
    ended: float
    logit: float
    diverged: bool


@dataclass(frozen=True)
class Arm:
    """The runs that share everything but learning rate and seed.

    Attributes:
        name: what tells them from the others, such as `stability=qknorm`; `all` where nothing does.
        curves: for each seed, its points by rising rate; where runs are missing, fewer than the grid has.
        grid: every rate of the comparison, rising.
        missing: why it is incomplete, a line for each run that is not there or not over.
    """

    name: str
    curves: Mapping[str, Sequence[Point]]
    grid: tuple[float, ...] = ()
    missing: list[str] = field(default_factory=list)

    def sensitivities(self) -> list[float]:
        """The sensitivity of each seed whose grid is complete, in nats."""
        whole = [curve for curve in self.curves.values() if len(curve) == len(self.grid)]
        return [sensitivity([point.loss for point in curve]) for curve in whole]

    def at(self, rate: float) -> list[Point]:
        """The points at one rate, one a seed."""
        return [point for curve in self.curves.values() for point in curve if point.rate == rate]


def sensitivity(losses: Sequence[float]) -> float:
    """Mean distance of the losses from their lowest, in nats."""
    return statistics.fmean(losses) - min(losses)


def point(run: Run) -> Point | None:
    """What a run contributes: nothing before it is over, for it does not say where it would have ended."""
    start = run.first("train/ce")
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
    """The runs sorted into arms; those that share everything with no run of another learning rate are in none.

    Of runs that share everything, the last that is over counts.
    """
    sorted_runs = {
        name: seeds
        for name, seeds in grouped([run for run in runs if not math.isnan(rate_of(run))]).items()
        if any(len(seed) > 1 for seed in seeds.values())
    }
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
    """Runs by what tells them apart, by seed and by rate."""
    where = [name for name in ("card", "precision") if len({getattr(run, name) for run in runs}) > 1]
    keys = enough(runs, [key for key in telling(runs, but=(RATE, SEED)) if key not in where])
    found: dict[str, dict[str, dict[float, Run]]] = {}
    for run in runs:
        name = " ".join(
            [f"{key}={shown(value_of(run, key))}" for key in keys] + [f"{key}={getattr(run, key)}" for key in where]
        )
        curve = found.setdefault(name or "all", {}).setdefault(shown(value_of(run, SEED)), {})
        rate = rate_of(run)
        if rate not in curve or point(run) is not None:
            curve[rate] = run
    return found


def rate_of(run: Run) -> float:
    """A run's peak learning rate; NaN where it is not known."""
    value = value_of(run, RATE)
    return float(value) if isinstance(value, int | float) else math.nan


def markdown(found: Sequence[Arm]) -> str:
    """A Markdown table: final loss by rate, mean over the seeds, and each arm's sensitivity with its spread."""
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
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cell(points: Sequence[Point]) -> str:
    """Mean loss over the seeds, and how many of them diverged, or ended above their loss at init, which then counts."""
    if not points:
        return "-"
    diverged, above = sum(p.diverged for p in points), sum(p.ended > p.loss for p in points)
    notes = [f"{count} {what}" for count, what in ((diverged, "diverged"), (above, "above init")) if count]
    mean = f"{statistics.fmean(point.loss for point in points):.3f}"
    return f"{mean} ({', '.join(notes)})" if notes else mean


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds; `incomplete` where no seed has its whole grid."""
    if not values:
        return "incomplete"
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"
