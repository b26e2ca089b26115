"""Draws learning-rate sensitivity curves and training losses with matplotlib."""

import math
import textwrap
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stabletrain.beside.comparison.groups import Group, groups, mean_of
from stabletrain.beside.comparison.reading.columns import Curve, not_finite
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.settings import distinguishing_keys, setting_text, value_of
from stabletrain.beside.comparison.sensitivity import Arm
from stabletrain.errors import ConfigError, closest

Drawn = TypeVar("Drawn", Run, Group)

FORMATS = (".svg", ".png", ".pdf")


def draw(found: Sequence[Arm], file: Path) -> None:
    """Draws the final loss, and the largest attention logit if it was logged, against the learning rate.

    A line is the mean over the seeds, a band spans the lowest to the highest, and a cross marks a diverged run, which
    counts as its loss at init. The picture says so. The file extension, such as .svg, sets the format.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format or folder.
    """
    check_name(file)
    seen = any(not math.isnan(point.logit) for arm in found for curve in arm.curves.values() for point in curve)
    panels = [("min(final, initial) loss (nats)", "loss"), ("largest attention logit", "logit")][: 2 if seen else 1]
    with canvas(file, width=11 if seen else 7, panels=len(panels)) as axes:
        for axis, (label, field) in zip(axes, panels, strict=True):
            for arm in found:
                rates = [rate for rate in arm.grid if arm.at(rate)]
                values = [[getattr(point, field) for point in arm.at(rate)] for rate in rates]
                means = [sum(each) / len(each) for each in values]
                (line,) = axis.plot(rates, means, marker="o", ms=3, label=wrapped(f"{arm.name} (n={len(arm.curves)})"))
                lowest, highest = list(map(min, values)), list(map(max, values))
                axis.fill_between(rates, lowest, highest, alpha=0.2, color=line.get_color())
                for rate in rates:
                    lost = [getattr(point, field) for point in arm.at(rate) if point.diverged]
                    axis.plot([rate] * len(lost), lost, "x", ms=5, color=line.get_color())
            axis.set(xscale="log", xlabel="peak learning rate", ylabel=label)
        if seen:
            axes[1].set_yscale("log")
            # Runs with larger logits diverged in arXiv 2309.14322.
            axes[1].axhline(1e4, color="grey", lw=0.8, ls="--")
        lost = sum(point.diverged for arm in found for curve in arm.curves.values() for point in curve)
        missing = sum(len(arm.missing) for arm in found)
        notes = ["line: mean over n seeds; band: lowest to highest"]
        notes += [f"cross: diverged, counted as its loss at init ({lost})"] if lost else []
        notes += [f"{missing} of the grid's runs are missing or not over"] if missing else []
        say_and_name(axes, notes)


@contextmanager
def canvas(file: Path, *, width: float, panels: int = 1, height: float = 3.6) -> Generator[list[Any], None, None]:
    """Yields axes side by side, and saves the figure to `file`. The same drawing gives the same bytes."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError('a picture needs matplotlib: pip install "stabletrain[picture]"') from None
    mpl.use("agg")
    # A fixed salt for ids, and no date below: otherwise the bytes of an SVG differ each time.
    mpl.rcParams["svg.hashsalt"] = "stabletrain"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width, height), squeeze=False)
    yield list(axes[0])
    if legend := axes[0][-1].get_legend():  # high enough for all its names, and an inch for the margins
        figure.set_figheight(max(height, legend.get_window_extent().height / figure.dpi + 1))
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def check_name(file: Path) -> None:
    """Checks the extension and the folder of a picture; raises ConfigError."""
    if file.suffix not in FORMATS:
        raise ConfigError(f"{file}: unsupported file extension: use {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: the folder {file.parent} does not exist: create it first")


TWENTY_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
    *("#aec7e8", "#ffbb78", "#98df8a", "#ff9896", "#c5b0d5", "#c49c94", "#f7b6d2", "#c7c7c7", "#dbdb8d", "#9edae5"),
)
"""The ten default colours of matplotlib, and their light variants (its map tab20)."""

WIDEST = 46
"""Maximum number of characters in a line of the legend. A longer name is wrapped."""

FEW = 10
"""Below this number, the points of a curve are marked."""

MOST = 30
"""Maximum number of lines in one picture. If there are more, those with the lowest and highest losses are drawn."""

FAR = 4.0
"""The loss axis is logarithmic if a drawn loss is more than this many times the lowest first loss."""


def draw_losses(
    runs: Sequence[Run], file: Path, smooth: int = 0, each: bool = False, labels: Mapping[str, str] | None = None
) -> None:
    """Draws the training losses of some runs over the steps.

    Runs that differ only in their seed are drawn as their mean and a band of one standard deviation. Runs that broke
    or are not over are in no mean, and drawn by themselves (dashed).

    For a run that is drawn by itself, a line goes through the logged losses of the applied steps. It ends with a mark
    at the top if the loss becomes NaN or infinite. A cross marks a skipped step (at the top, if its loss is not
    finite), a thin line the losses that were rolled back, a vertical line the step of a halt (dash-dotted if the run
    went on with a fix), a triangle a forecast. The picture says which of these it holds, and what it leaves out. The
    file extension, such as .svg, sets the format.

    Args:
        smooth: number of steps over which a running mean goes (see `running_mean`); the logged losses are then a faint
            line behind it. 0 draws these alone.
        each: draw every run by itself.
        labels: names in the legend by the name of the run, for some or all runs; every run is then drawn by itself.

    Raises:
        ConfigError: matplotlib is not installed, the file cannot be written in that format or folder, `smooth` is
            below 0, or no run has the name of a label.
    """
    check_name(file)
    if smooth < 0:
        raise ConfigError(f"smooth={smooth} is below 0: give a number of steps, such as 50, or 0 for the logged losses")
    trained = [run for run in runs if run.steps]
    found = [] if each or labels else groups(trained)
    folded = len(found) < len(trained) and bool(found)
    named = run_names(runs, trained, labels or {})
    drawn = best_and_worst(found if folded else trained, MOST)
    alone = [run for group in drawn if isinstance(group, Group) for run in (*group.broke, *group.not_over)]
    lines = len(drawn) + len(alone[:MOST])
    with canvas(file, width=10.5, height=max(3.8, 1.2 + 0.2 * lines)) as (axis,):
        kinds: list[str] = []
        if len(drawn) > 10:  # the default has ten colours
            axis.set_prop_cycle(color=TWENTY_COLOURS)
        for unit in drawn:
            if isinstance(unit, Group):
                kinds += draw_group(axis, unit, [run for run in alone[:MOST] if run in unit.runs], smooth)
            else:
                kinds += draw_run(axis, unit, named[id(unit)], smooth)
        unit = " (nats)" if all(run.loss_unit for run in trained) else ""
        over = f",\nrunning mean over {smooth} steps" if smooth else ""
        axis.set(xlabel="step", ylabel=f"training loss{unit}{over}")
        firsts = [run.first("train/loss") for run in trained]
        reach_all(axis, min(filter(math.isfinite, firsts), default=0.0))
        notes = [text for kind, text in KINDS.items() if kind in kinds]
        what = "settings" if folded else "runs"
        if len(drawn) < len(found if folded else trained):
            notes.append(f"{len(drawn)} of {len(found if folded else trained)} {what}: lowest and highest losses")
        if len(alone) > MOST:
            notes.append(f"{len(alone) - MOST} more runs that broke or are not over are not drawn")
        if len(trained) < len(runs):
            notes.append(f"{len(runs) - len(trained)} of {len(runs)} runs logged no step")
        say_and_name([axis], notes)


KINDS = {
    "mean": "line: mean over n seeds at the steps that all have applied; band: ± 1 standard deviation (n - 1)",
    "marked": "skips, rollbacks and forecasts of the runs in a mean are not drawn",
    "alone": "dashed: a run that broke or is not over, in no mean",
    "nan": "filled cross at the top: NaN or infinite from this step on",
    "skip": "cross: skipped step (at the top: loss not finite)",
    "rollback": "thin line: rolled back",
    "halt": "vertical line: halted",
    "heal": "dash-dotted line: halted, went on with a fix",
}
"""What a picture of losses may hold, in words."""


def draw_group(axis: Any, group: Group, alone: Sequence[Run], smooth: int) -> list[str]:
    """Draws the mean and deviation of a group, and its runs `alone` by themselves; returns the kinds of `KINDS`."""
    kinds, color = [], None
    if group.sound:
        mean = mean_of([run.applied_and_skipped_losses()[0] for run in group.sound])
        marker = "o" if len(mean.steps) < FEW else ""
        (line,) = axis.plot(mean.steps, mean.mean, label=wrapped(group.title), lw=1.2, marker=marker, ms=3)
        color = line.get_color()
        if len(group.sound) > 1:
            axis.fill_between(
                mean.steps, mean.mean - mean.deviation, mean.mean + mean.deviation, alpha=0.2, color=color, lw=0
            )
            kinds.append("mean")
        if smooth:
            line.set(alpha=0.3, lw=0.6, label="_behind")
            over = running_mean(mean.steps, mean.mean, smooth)
            axis.plot(mean.steps, over, label=wrapped(group.title), lw=1.2, color=color)
        kinds += ["marked"] if any(run.skips or run.rollbacks or run.forecasts for run in group.sound) else []
    for run in alone:
        how = "broke" if run in group.broke else run.status
        name = f"{group.name} seed={setting_text(value_of(run, 'seed'))} ({how})"
        kinds += ["alone", *draw_run(axis, run, name, smooth, color, ls="--")]
    return kinds


def draw_run(axis: Any, run: Run, name: str, smooth: int, color: Any = None, ls: str = "-") -> list[str]:
    """Draws one run's losses, and what befell it, in one colour; returns the kinds of `KINDS`; see `draw_losses`."""
    (steps, losses), (skipped, lost) = applied_and_skipped_losses(run)
    kinds, marker = [], "o" if len(steps) < FEW else ""  # a line through one point is invisible
    ends = not_finite((steps, losses))
    said = "".join(f", {word} from step {step}" for step, word in ends[:1])
    style = {"color": color} if color else {}
    if smooth:
        over = running_mean(steps, losses, smooth)
        (line,) = axis.plot(steps, over, label=wrapped(name + said), lw=1.2, ls=ls, **style)
        axis.plot(steps, losses, lw=0.6, alpha=0.3, marker=marker, ms=3, color=line.get_color())
    else:
        (line,) = axis.plot(steps, losses, label=wrapped(name + said), lw=1.0, ls=ls, marker=marker, ms=3, **style)
    finite, color = np.isfinite(lost), line.get_color()
    at_top = {"transform": axis.get_xaxis_transform(), "color": color}
    axis.plot(skipped[finite], lost[finite], "x", ms=3, color=color)
    axis.plot(skipped[~finite], np.full((~finite).sum(), 0.97), "x", ms=3, **at_top)
    kinds += ["skip"] if len(skipped) else []
    if ends:
        axis.plot([step for step, _ in ends], [0.97] * len(ends), "X", ms=7, mec="black", **at_top)
        kinds.append("nan")
    if told := [each["step"] for each in run.forecasts if len(steps)]:
        words = f"forecast for {name}: step{'s' if len(told) > 1 else ''} {listed(told)}"
        heights = np.interp(told, *line.get_data())
        axis.plot(told, heights, "v", ms=7, color=color, mec="black", zorder=3, label=wrapped(words))
    if run.status == "halted":
        axis.axvline(run.steps, lw=0.8, color=color)
        kinds.append("halt")
    for each in run.healings:
        axis.axvline(each["step"], lw=0.8, ls="-.", color=color)
        kinds.append("heal")
    for rolled_back in run.abandoned("train/loss"):
        axis.plot(*rolled_back, color=color, lw=0.5, alpha=0.5)
        kinds.append("rollback")
    return kinds


def run_names(runs: Sequence[Run], trained: Sequence[Run], labels: Mapping[str, str]) -> dict[int, str]:
    """Returns the name of each trained run by its `id()`: its label, or what tells it apart; raises ConfigError."""
    known = [run.name for run in trained]
    for name in labels:
        if name not in known:
            near = closest(name, known)
            hint = f"did you mean {near}?" if near else f"the runs are {', '.join(known[:10]) or 'none'}"
            raise ConfigError(f"--label {name}=...: no run has this name; {hint}")
    keys = distinguishing_keys(runs, but=())
    names = [" ".join(f"{key}={setting_text(value_of(run, key))}" for key in keys) or run.name for run in trained]
    return {
        id(run): labels.get(run.name) or (f"{name} ({run.name})" if names.count(name) > 1 else name)
        for run, name in zip(trained, names, strict=True)
    }


def reach_all(axis: Any, first: float) -> None:
    """Makes the loss axis logarithmic if a drawn loss is more than `FAR` times the lowest `first` loss."""
    drawn = [line.get_ydata() for line in axis.lines if line.get_transform() == axis.transData]
    losses = np.concatenate([np.asarray(each, float) for each in drawn] or [np.empty(0)])
    losses = losses[np.isfinite(losses)]
    if len(losses) and losses.min() > 0 and losses.max() > FAR * first:
        axis.set_yscale("log")
        from matplotlib.ticker import LogLocator, NullFormatter

        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")  # 20, and not 2 x 10^1
        axis.yaxis.set_minor_formatter(NullFormatter())


def say_and_name(axes: Sequence[Any], notes: Iterable[str]) -> None:
    """Writes the notes above the first axis, and the legend beside the last one, where it hides no curve."""
    text = "\n".join(notes)
    axes[0].set_title(text, fontsize=7, loc="left")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        small = 8 if len(labels) < 10 else 6
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
        axes[-1].legend(handles, labels, fontsize=small, **place)
    for axis in axes:
        axis.grid(alpha=0.3)


def wrapped(name: str) -> str:
    """Breaks a long name into several lines."""
    return "\n".join(textwrap.wrap(name, WIDEST, break_on_hyphens=False)) or name


def listed(steps: Sequence[int], most: int = 4) -> str:
    """Lists the first steps, and how many more there are."""
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return ", ".join(map(str, steps[:most])) + more


def best_and_worst(found: Sequence[Drawn], most: int) -> list[Drawn]:
    """Selects at most `most` runs or groups, half with the lowest and half with the highest losses, in their order."""

    def last(one: Run | Group) -> float:
        runs = one.sound if isinstance(one, Group) else [one]
        return float(np.mean([np.nan_to_num(run.last("train/loss"), nan=np.inf) for run in runs] or [np.inf]))

    ranked = sorted(found, key=last)
    chosen = ranked if len(ranked) <= most else ranked[: most // 2] + ranked[-(most // 2) :]
    return [one for one in found if any(one is each for each in chosen)]


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
    logged ones. A value that is not finite is in no mean, and stays itself. `pictures.js` does the same.
    """
    means, total, weight = [], 0.0, 0.0
    for past, value in zip(np.diff(steps, prepend=steps[:1]), values, strict=True):
        if not math.isfinite(value):
            means.append(value)
            continue
        kept = math.exp(-past / over)
        total, weight = kept * total + value, kept * weight + 1.0
        means.append(total / weight)
    return np.array(means)
