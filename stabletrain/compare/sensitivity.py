"""Sensitivity to the learning rate: how much a run loses, on average over a grid of rates, against the best of them.

    sensitivity = mean over the grid of min(final validation loss, loss at init)  -  the lowest of these

A run that ended in NaN, or was halted, counts as its loss at init. The number alone can deceive, for a model stuck at
chance at every rate scores 0: always look at the curves. Source: Wortsman et al., arXiv 2309.14322, section 2.2.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stabletrain.compare.runs import Run, varied
from stabletrain.errors import ConfigError

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
        name: what was typed for them and not for the others, such as `stability=qknorm`.
        curves: for each seed, its points by rising rate.
    """

    name: str
    curves: Mapping[str, Sequence[Point]]

    def sensitivities(self) -> list[float]:
        """The sensitivity of each seed, in nats."""
        return [sensitivity([point.loss for point in curve]) for curve in self.curves.values()]

    def at(self, rate: float) -> list[Point]:
        """The points at one rate, one a seed."""
        return [point for curve in self.curves.values() for point in curve if point.rate == rate]


def sensitivity(losses: Sequence[float]) -> float:
    """Mean distance of the losses from their lowest, in nats."""
    return statistics.fmean(losses) - min(losses)


def point(run: Run) -> Point:
    """What a run contributes.

    Raises:
        ConfigError: it is not over.
    """
    start, status = run.first("train/ce"), run.record.get("status")
    if start is None or status not in ("finished", "halted"):
        raise ConfigError(
            f"{run.folder}: its status is {status}, so it says nothing of where it would have ended: finish it with "
            "resume, or leave it out"
        )
    final = run.last("val/loss") if status == "finished" else None
    good = final is not None and math.isfinite(final)
    logits = [value for value in run.values(LOGIT) if not math.isnan(value)]
    return Point(
        rate=float(run.overrides[RATE]),
        loss=min(final, start) if good and final is not None else start,
        ended=final if good and final is not None else math.nan,
        logit=max(logits, default=math.nan),
        diverged=not good,
    )


def arms(runs: Sequence[Run]) -> list[Arm]:
    """The runs of a sweep over `optimizer.lr`, sorted into arms.

    Raises:
        ConfigError: the learning rate was not varied, a run is there twice, or arms have different grids.
    """
    keys = varied(runs)
    if RATE not in keys:
        raise ConfigError(f"{RATE} does not differ between these runs: sweep it, such as {RATE}=1e-3,1e-2,1e-1 with -m")
    sorted_runs: dict[str, dict[str, dict[float, Point]]] = {}
    for run in runs:
        if RATE not in run.overrides:
            raise ConfigError(f"{run.folder}: its {RATE} was not typed, so it is no part of the sweep: leave it out")
        name = " ".join(f"{key}={run.overrides.get(key, '-')}" for key in keys if key not in (RATE, SEED))
        curve = sorted_runs.setdefault(name or "all", {}).setdefault(run.overrides.get(SEED, "-"), {})
        this = point(run)
        if this.rate in curve:
            raise ConfigError(f"{run.folder}: {name} at {RATE}={this.rate:g} is there twice: leave one out")
        curve[this.rate] = this
    grids = {tuple(sorted(curve)) for curves in sorted_runs.values() for curve in curves.values()}
    if len(grids) > 1:
        raise ConfigError(f"the arms do not share one grid of {RATE}: some runs are missing; run the sweep again")
    return [
        Arm(name, {seed: [curve[rate] for rate in sorted(curve)] for seed, curve in curves.items()})
        for name, curves in sorted_runs.items()
    ]


def table(found: Sequence[Arm]) -> str:
    """A Markdown table: final loss by rate, mean over the seeds, and each arm's sensitivity with its spread."""
    rates = [point.rate for point in next(iter(found[0].curves.values()))]
    head = [RATE, *(f"{rate:g}" for rate in rates), "sensitivity"]
    rows = [head, ["---"] * len(head)]
    for arm in found:
        rows.append([arm.name, *(cell(arm.at(rate)) for rate in rates), spread(arm.sensitivities())])
    if any(not math.isnan(point.logit) for arm in found for rate in rates for point in arm.at(rate)):
        rows.append(["*largest attention logit*", *[""] * (len(head) - 1)])
        for arm in found:
            largest = [max((point.logit for point in arm.at(rate)), default=math.nan) for rate in rates]
            rows.append([arm.name, *(f"{logit:.3g}" for logit in largest), ""])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cell(points: Sequence[Point]) -> str:
    """Mean loss over the seeds, and how many of them diverged, or ended above their loss at init, which then counts."""
    diverged, above = sum(p.diverged for p in points), sum(p.ended > p.loss for p in points)
    notes = [f"{count} {what}" for count, what in ((diverged, "diverged"), (above, "above init")) if count]
    mean = f"{statistics.fmean(point.loss for point in points):.3f}"
    return f"{mean} ({', '.join(notes)})" if notes else mean


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds."""
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"
