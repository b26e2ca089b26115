"""Runs that differ only in their seed as one curve: the mean over the runs, and their standard deviation.

A run that broke, or that is not over, is in no mean: it is a line by itself. The mean is taken at the steps that all
of the other runs have logged, so that it never jumps because their number changes.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from stabletrain.beside.comparison.reading.columns import Curve
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.settings import distinguishing_keys, setting_text, value_of, without_implied

SEED = "seed"

LOST = 1.1
"""A loss is lost above this multiple of that of the first step. What learns nothing stays below it."""

NOT_OVER = ("running", "preempted", "empty", "broken")
"""Statuses of runs that may still end well, or of which nothing is known."""


class Mean(NamedTuple):
    """A mean curve.

    Attributes:
        steps: int64 `[point]`.
        mean, deviation: float64 `[point]`; the deviation is the sample's, over the runs.
    """

    steps: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


class Group(NamedTuple):
    """Runs that differ only in their seed.

    Attributes:
        name: the settings that tell the groups apart, such as `precision=bf16 optimizer.lr=0.01`; `all` if none does.
        sound: the runs in the mean.
        broke: runs that were halted, failed, or ended with a lost loss; see `is_lost_loss`.
        not_over: runs that are not over, or cannot be read.
    """

    name: str
    sound: Sequence[Run]
    broke: Sequence[Run]
    not_over: Sequence[Run]

    @property
    def runs(self) -> list[Run]:
        """All runs of the group."""
        return [*self.sound, *self.broke, *self.not_over]

    @property
    def title(self) -> str:
        """The name with the number of runs in the mean: `precision=bf16 (n=2 of 3, 1 broke)`."""
        others = [(self.broke, "broke"), (self.not_over, "not over")]
        counts = [f"{len(runs)} {what}" for runs, what in others if runs]
        of = f" of {len(self.runs)}" if counts else ""
        return f"{self.name} ({', '.join([f'n={len(self.sound)}{of}', *counts])})"


def groups(runs: Sequence[Run]) -> list[Group]:
    """Groups runs that differ only in their seed, in the order of their first runs.

    If some runs agree in settings and seed, as those of a sweep that was run twice, the sweeps are groups apart.
    """
    names = setting_names(runs)
    known = {(name, value_of(run, SEED)) for run, name in zip(runs, names, strict=True)}
    if len(known) < len(runs):
        above = {run.folder.parent for run in runs}
        whole = len({each.name for each in above}) < len(above)
        sweeps = [str(run.folder.parent) if whole else run.sweep for run in runs]
        names = [sweep if name == "all" else f"{name} ({sweep})" for name, sweep in zip(names, sweeps, strict=True)]
    found: dict[str, tuple[list[Run], list[Run], list[Run]]] = {}
    for run, name in zip(runs, names, strict=True):
        sound, broke, not_over = found.setdefault(name, ([], [], []))
        (not_over if run.status in NOT_OVER else broke if is_lost(run) else sound).append(run)
    return [Group(name, *members) for name, members in found.items()]


def setting_names(runs: Sequence[Run], but: Sequence[str] = ("seed",)) -> list[str]:
    """Returns for each run the settings that tell it apart, `qknorm=none optimizer.lr=0.1`; `all` if there are none.

    Args:
        but: keys to ignore.
    """
    where = [name for name in ("card", "precision") if len({getattr(run, name) for run in runs}) > 1]
    keys = without_implied(runs, [key for key in distinguishing_keys(runs, but) if key not in where])
    words = [
        [f"{key}={setting_text(value_of(run, key))}" for key in keys] + [f"{key}={getattr(run, key)}" for key in where]
        for run in runs
    ]
    return [" ".join(each) or "all" for each in words]


def is_lost(run: Run) -> bool:
    """Returns whether a run that is over broke: halted, failed, or with a lost loss."""
    name = "val/loss" if "val/loss" in run.ranges else "train/loss"
    return run.status in ("halted", "failed") or is_lost_loss(run.last(name), run.initial_loss)


def is_lost_loss(last: float, initial: float) -> bool:
    """Returns whether the last loss is not finite, or more than a tenth above that of the first step.

    The latter is not asked if that of the first step is not known (NaN) or not positive.
    """
    return not math.isfinite(last) or last > LOST * initial > 0


def mean_of(curves: Sequence[Curve]) -> Mean:
    """Returns the mean of curves at the steps that all of them have; a deviation of one curve is 0."""
    unique = [(np.unique(steps), dict(zip(steps.tolist(), values.tolist(), strict=True))) for steps, values in curves]
    steps = reduce(np.intersect1d, [steps for steps, _ in unique])
    values = np.array([[known[step] for step in steps.tolist()] for _, known in unique]).reshape(len(unique), -1)
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
    return Mean(steps.astype(np.int64), values.mean(axis=0), deviation)
