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


LONGEST = 60
"""Maximum length of a name in the legend. If a name is longer, all runs are named by their folders."""

FEW = 10
"""Below this number, the points of a curve are marked."""

MOST = 30
"""Maximum number of runs in one picture. If there are more, those with the lowest and highest losses are drawn."""


def draw_losses(runs: Sequence[Run], file: Path, smooth: int = 0) -> None:
    """Draws the training losses of some runs over the steps.

    A line goes through the logged losses of the applied steps. A cross marks a skipped step (at the top, if its loss is
    not finite), a thin line the losses that were rolled back, a vertical line the step of a halt (dash-dotted if the
    run went on with a fix), a triangle a forecast. The file extension, such as .svg, sets the format.

    Args:
        smooth: number of steps over which a running mean goes (see `running_mean`); the logged losses are then a faint
            line behind it. 0 draws these alone.

    Raises:
        ConfigError: matplotlib is not installed, the file cannot be written in that format or folder, or `smooth` is
            below 0.
    """
    check_name(file)
    if smooth < 0:
        raise ConfigError(f"smooth={smooth} is below 0: give a number of steps, such as 50, or 0 for the logged losses")
    trained = [run for run in runs if run.steps]
    drawn = best_and_worst(trained, MOST)
    keys = distinguishing_keys(runs, but=())
    with canvas(file, width=9.0) as (axis,):
        names = [", ".join(f"{key}={setting_text(value_of(run, key))}" for key in keys) or run.name for run in drawn]
        if max(map(len, names), default=0) > LONGEST:
            names = [run.name for run in drawn]
        for run, name in zip(drawn, names, strict=True):
            draw_run(axis, run, f"{name} ({run.name})" if names.count(name) > 1 else name, smooth)
        over = f", running mean over {smooth} steps" if smooth else ""
        axis.set(xlabel="step", ylabel=f"training loss (nats){over}")
        if len(drawn) < len(trained):
            axis.set_title(f"{len(drawn)} of {len(trained)} runs: the lowest and the highest losses", fontsize=9)
        axis.grid(alpha=0.3)
        if drawn:  # beside the axis, where it hides no curve
            small = 8 if len(drawn) < 10 else 5
            axis.legend(fontsize=small, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def draw_run(axis: Any, run: Run, name: str, smooth: int) -> None:
    """Draws one run's losses, and what befell it, in one colour; see `draw_losses`."""
    (steps, losses), (skipped, lost) = applied_and_skipped_losses(run)
    marker = "o" if len(steps) < FEW else ""  # a line through one point is invisible
    if smooth:
        (line,) = axis.plot(steps, running_mean(steps, losses, smooth), label=name, lw=1.2)
        axis.plot(steps, losses, lw=0.6, alpha=0.3, marker=marker, ms=3, color=line.get_color())
    else:
        (line,) = axis.plot(steps, losses, label=name, lw=1.0, marker=marker, ms=3)
    finite, color = np.isfinite(lost), line.get_color()
    axis.plot(skipped[finite], lost[finite], "x", ms=3, color=color)
    at_top = {"transform": axis.get_xaxis_transform(), "color": color}
    axis.plot(skipped[~finite], np.full((~finite).sum(), 0.97), "x", ms=3, **at_top)
    if told := [each["step"] for each in run.forecasts if len(steps)]:
        axis.plot(told, np.interp(told, *line.get_data()), "v", ms=7, color=color, mec="black", zorder=3)
    if run.status == "halted":
        axis.axvline(run.steps, lw=0.8, color=color)
    for each in run.healings:
        axis.axvline(each["step"], lw=0.8, ls="-.", color=color)
    for rolled_back in run.abandoned("train/loss"):
        axis.plot(*rolled_back, color=color, lw=0.5, alpha=0.5)


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


def running_mean(steps: np.ndarray, values: np.ndarray, over: int) -> np.ndarray:
    """Returns bias-corrected exponential running means `[point]`.

    A value weighs less by a factor of e for every `over` steps that it is old, however many steps lie between two
    logged ones.
    """
    means, total, weight = [], 0.0, 0.0
    for past, value in zip(np.diff(steps, prepend=steps[:1]), values, strict=True):
        kept = math.exp(-past / over)
        total, weight = kept * total + value, kept * weight + 1.0
        means.append(total / weight)
    return np.array(means)
