"""Judges detectors on recorded runs: recall, lead and false alarms, at a threshold chosen on other runs.

A detector gives one number for each look of a run; there is an alarm at a look if it is at least the threshold.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.reliability.foresight.looks import HORIZON, Watched

EARLIEST, LATEST = 500, 20
"""Steps before a break between which an alarm is a hit."""

SAMPLES = 1000
"""Bootstrap samples of runs."""

Scores = Mapping[str, np.ndarray]
"""A detector's numbers by run, one for each look."""


def false_alarms(steps: Sequence[int], alarms: np.ndarray) -> int:
    """Returns the number of alarms; those within a horizon of the first count as one."""
    count, until = 0, -1
    for step, alarm in zip(steps, alarms, strict=True):
        if alarm and step > until:
            count, until = count + 1, step + HORIZON
    return count


def threshold_at(rate: float, runs: Sequence[Watched], scores: Scores) -> float:
    """Returns the lowest threshold with at most `rate` false alarms in 1,000 steps of these runs without an event."""
    steps = sum(each.steps[-1] for each in runs)
    found = np.unique(np.concatenate([scores[each.run.name] for each in runs]))
    low, high = 0, len(found)  # the threshold beyond the largest number has no alarm
    while low < high:
        middle = (low + high) // 2
        count = sum(false_alarms(each.steps, scores[each.run.name] >= found[middle]) for each in runs)
        low, high = (low, middle) if count / steps * 1000 <= rate else (middle + 1, high)
    return float(found[low]) if low < len(found) else math.nextafter(float(found[-1]), math.inf)


@dataclass(frozen=True)
class Verdict:
    """How a detector did on one run with an event, or without.

    Attributes:
        name: of the run.
        broke, hit, lead: whether it breaks; whether an alarm came 20 to 500 steps before; how many steps.
        worse, early: whether it ends worse; whether an alarm came in the first half.
        alarms, steps, share: false alarms; steps; share of looks in alarm.
    """

    name: str
    broke: bool
    hit: bool
    lead: float
    worse: bool
    early: bool
    alarms: int
    steps: int
    share: float


def judge(each: Watched, scores: np.ndarray, threshold: float) -> Verdict:
    """Returns how a detector did on one run."""
    run, steps = each.run, np.array(each.steps)
    alarms = scores >= threshold
    ahead = np.full(len(steps), -1) if run.broke is None else run.broke - steps
    hits = alarms & (ahead >= LATEST) & (ahead <= EARLIEST)
    return Verdict(
        run.name,
        run.broke is not None,
        bool(hits.any()),
        float(ahead[hits.argmax()]) if hits.any() else math.nan,
        run.worse,
        bool((alarms & (steps <= run.steps / 2)).any()),
        0 if run.trouble else false_alarms(each.steps, alarms),
        int(steps[-1]),
        float(alarms.mean()),
    )


def summary(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Returns counts, recalls, median lead, false alarms in 1,000 steps, and the share of looks in alarm."""
    breaks, worse = [v for v in verdicts if v.broke], [v for v in verdicts if v.worse]
    quiet = [v for v in verdicts if not (v.broke or v.worse)]
    return {
        "breaks": len(breaks),
        "recall_breaks": share(v.hit for v in breaks),
        "lead": float(np.median([v.lead for v in breaks if v.hit] or [math.nan])),
        "worse": len(worse),
        "recall_worse": share(v.early for v in worse),
        "quiet_steps": sum(v.steps for v in quiet),
        "false_alarms": sum(v.alarms for v in quiet) / max(sum(v.steps for v in quiet), 1) * 1000,
        "in_alarm": float(np.mean([v.share for v in quiet])) if quiet else math.nan,
    }


def share(true) -> float:
    """Returns the share of true values; NaN without any."""
    values = [*true]
    return sum(values) / len(values) if values else math.nan


def interval(verdicts: Sequence[Verdict], of: str) -> tuple[float, float]:
    """Returns the 90 % bootstrap interval of a number of the summary, over runs."""
    random = np.random.default_rng(0)
    drawn = [
        summary([verdicts[i] for i in random.integers(len(verdicts), size=len(verdicts))])[of] for _ in range(SAMPLES)
    ]
    low, high = np.nanquantile(drawn, [0.05, 0.95])
    return float(low), float(high)
