"""Training losses of some runs against their steps, with what was rolled back drawn thin beside the run's course."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stabletrain.compare.picture import canvas, check_name
from stabletrain.compare.reading.columns import Curve
from stabletrain.compare.reading.run import Run
from stabletrain.compare.reading.settings import shown, telling, value_of

SMOOTHING = 0.9
"""Weight of the past in the mean that is drawn."""

MOST = 30
"""Runs in one picture; of more, those with the lowest and highest losses."""


def draw_losses(runs: Sequence[Run], file: Path) -> None:
    """Writes the picture; its ending, such as .svg or .png, decides the format.

    Lines are running means (`SMOOTHING`), and losses of skipped steps are left out of them; a cross marks each skip.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format.
    """
    check_name(file)
    drawn = ends([run for run in runs if run.steps], MOST)
    keys = telling(runs, but=())
    with canvas(file, width=7.0) as (axis,):
        for run in drawn:
            name = ", ".join(f"{key}={shown(value_of(run, key))}" for key in keys) or run.name
            (steps, losses), (skipped, lost) = course(run)
            (line,) = axis.plot(steps, smooth(losses), label=name, lw=1.2)
            axis.plot(skipped, lost, "x", ms=3, color=line.get_color())
            for steps, losses in run.abandoned("train/loss"):
                axis.plot(steps, losses, color=line.get_color(), lw=0.5, alpha=0.5)
        axis.set(xlabel="step", ylabel="training loss, nats")
        axis.grid(alpha=0.3)
        if drawn:
            axis.legend(fontsize=8 if len(drawn) < 10 else 5)


def ends(runs: Sequence[Run], most: int) -> list[Run]:
    """At most so many of the runs, in their order: half with the lowest losses, half with the highest."""
    ranked = sorted(runs, key=lambda run: np.nan_to_num(run.last("train/loss"), nan=np.inf))
    chosen = ranked if len(ranked) <= most else ranked[: most // 2] + ranked[-(most // 2) :]
    return [run for run in runs if any(run is each for each in chosen)]


def course(run: Run) -> tuple[Curve, Curve]:
    """Steps and losses of the applied steps, and of those that were skipped."""
    steps, losses = run.curve("train/loss", points=-1)
    gates, applied = run.curve("guard/applied", points=-1)
    skipped = np.isin(steps, gates[applied == 0])
    return (steps[~skipped], losses[~skipped]), (steps[skipped], losses[skipped])


def smooth(values: Sequence[float] | np.ndarray) -> list[float]:
    """Running means that give the past `SMOOTHING`, without a bias towards the first value."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1.0
        means.append(total / weight)
    return means
