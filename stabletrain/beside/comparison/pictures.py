"""Draws learning-rate sensitivity curves and training losses with matplotlib."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stabletrain.beside.comparison.reading.columns import Curve
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.settings import distinguishing_keys, setting_text, value_of
from stabletrain.beside.comparison.sensitivity import Arm
from stabletrain.errors import ConfigError

FORMATS = (".svg", ".png", ".pdf")


def draw(found: Sequence[Arm], file: Path) -> None:
    """Draws the final loss, and the largest attention logit if it was logged, against the learning rate.

    A line is the mean over the seeds, a band spans the lowest to the highest, and a cross marks a diverged run.
    The file extension, such as .svg, sets the format.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format or folder.
    """
    check_name(file)
    seen = any(not math.isnan(point.logit) for arm in found for curve in arm.curves.values() for point in curve)
    panels = [("min(final, initial) loss (nats)", "loss"), ("largest attention logit", "logit")][: 2 if seen else 1]
    with canvas(file, width=9 if seen else 5, panels=len(panels)) as axes:
        for axis, (label, field) in zip(axes, panels, strict=True):
            for arm in found:
                rates = [rate for rate in arm.grid if arm.at(rate)]
                values = [[getattr(point, field) for point in arm.at(rate)] for rate in rates]
                (line,) = axis.plot(rates, [sum(each) / len(each) for each in values], marker="o", ms=3, label=arm.name)
                lowest, highest = list(map(min, values)), list(map(max, values))
                axis.fill_between(rates, lowest, highest, alpha=0.2, color=line.get_color())
                for rate in rates:
                    lost = [getattr(point, field) for point in arm.at(rate) if point.diverged]
                    axis.plot([rate] * len(lost), lost, "x", ms=5, color=line.get_color())
            axis.set(xscale="log", xlabel="peak learning rate", ylabel=label)
            axis.grid(alpha=0.3)
        if seen:
            axes[1].set_yscale("log")
            # Runs with larger logits diverged in arXiv 2309.14322.
            axes[1].axhline(1e4, color="grey", lw=0.8, ls="--")
        axes[0].legend(fontsize=8)


@contextmanager
def canvas(file: Path, *, width: float, panels: int = 1) -> Generator[list[Any], None, None]:
    """Yields axes side by side, and saves the figure to `file`. The same drawing gives the same bytes."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError('a picture needs matplotlib: pip install "stabletrain[picture]"') from None
    mpl.use("agg")
    # A fixed salt for ids, and no date below: otherwise the bytes of an SVG differ each time.
    mpl.rcParams["svg.hashsalt"] = "stabletrain"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width, 3.6), squeeze=False)
    yield list(axes[0])
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def check_name(file: Path) -> None:
    """Checks the extension and the folder of a picture; raises ConfigError."""
    if file.suffix not in FORMATS:
        raise ConfigError(f"{file}: unsupported file extension: use {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: the folder {file.parent} does not exist: create it first")


SMOOTHING = 0.9
"""Weight of the past in the running mean of the losses."""

LONGEST = 60
"""Maximum length of a name in the legend. If a name is longer, all runs are named by their folders."""

FEW = 10
"""Below this number, the points of a curve are marked."""

MOST = 30
"""Maximum number of runs in one picture. If there are more, those with the lowest and highest losses are drawn."""


def draw_losses(runs: Sequence[Run], file: Path) -> None:
    """Draws the training losses of some runs over the steps.

    A line is the running mean (`SMOOTHING`) over the applied steps. A cross marks a skipped step (at the top, if its
    loss is not finite), a thin line the losses that were rolled back, a vertical line the step of a halt (dash-dotted
    if the run went on with a fix), a triangle a forecast. The file extension, such as .svg, sets the format.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format or folder.
    """
    check_name(file)
    drawn = best_and_worst([run for run in runs if run.steps], MOST)
    keys = distinguishing_keys(runs, but=())
    with canvas(file, width=7.0) as (axis,):
        names = [", ".join(f"{key}={setting_text(value_of(run, key))}" for key in keys) or run.name for run in drawn]
        if max(map(len, names), default=0) > LONGEST:
            names = [run.name for run in drawn]
        for run, name in zip(drawn, names, strict=True):
            name = f"{name} ({run.name})" if names.count(name) > 1 else name
            (steps, losses), (skipped, lost) = applied_and_skipped_losses(run)
            # A line through one point is invisible.
            (line,) = axis.plot(steps, smooth(losses), label=name, lw=1.2, ms=3, marker="o" if len(steps) < FEW else "")
            finite = np.isfinite(lost)
            axis.plot(skipped[finite], lost[finite], "x", ms=3, color=line.get_color())
            at_top = {"transform": axis.get_xaxis_transform(), "color": line.get_color()}
            axis.plot(skipped[~finite], np.full((~finite).sum(), 0.97), "x", ms=3, **at_top)
            if told := [each["step"] for each in run.forecasts if len(steps)]:
                marked = {"ms": 7, "color": line.get_color(), "mec": "black", "zorder": 3}
                axis.plot(told, np.interp(told, steps, smooth(losses)), "v", **marked)
            if run.status == "halted":
                axis.axvline(run.steps, lw=0.8, color=line.get_color())
            for each in run.healings:
                axis.axvline(each["step"], lw=0.8, ls="-.", color=line.get_color())
            for steps, losses in run.abandoned("train/loss"):
                axis.plot(steps, losses, color=line.get_color(), lw=0.5, alpha=0.5)
        axis.set(xlabel="step", ylabel="training loss (nats)")
        axis.grid(alpha=0.3)
        if drawn:
            axis.legend(fontsize=8 if len(drawn) < 10 else 5)


def best_and_worst(runs: Sequence[Run], most: int) -> list[Run]:
    """Selects at most `most` runs, half with the lowest and half with the highest losses, and keeps their order."""
    ranked = sorted(runs, key=lambda run: np.nan_to_num(run.last("train/loss"), nan=np.inf))
    chosen = ranked if len(ranked) <= most else ranked[: most // 2] + ranked[-(most // 2) :]
    return [run for run in runs if any(run is each for each in chosen)]


def applied_and_skipped_losses(run: Run) -> tuple[Curve, Curve]:
    """Returns the loss curve of the applied steps, and that of the skipped steps, as far as their losses are known."""
    applied, (steps, losses) = run.applied_and_skipped_losses()
    logged = dict(zip(steps.tolist(), losses.tolist(), strict=True))
    lost = [
        logged.get(step, loss) if np.isnan(loss) else loss
        for step, loss in zip(run.skips, run.skip_losses, strict=True)
    ]
    return applied, (np.array(run.skips, np.int64), np.array(lost))


def smooth(values: Sequence[float] | np.ndarray) -> list[float]:
    """Returns bias-corrected exponential running means with weight `SMOOTHING`."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1.0
        means.append(total / weight)
    return means
