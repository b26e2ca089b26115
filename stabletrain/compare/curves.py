"""Training losses of some runs against their steps, with what was rolled back drawn thin beside the run's course."""

from collections.abc import Sequence
from pathlib import Path

from stabletrain.compare.picture import canvas, check_name
from stabletrain.compare.runs import Run, varied

SMOOTHING = 0.9
"""Weight of the past in the mean that is drawn."""


def draw_losses(runs: Sequence[Run], file: Path) -> None:
    """Writes the picture; its ending, such as .svg or .png, decides the format.

    Lines are running means (`SMOOTHING`), and losses of skipped steps are left out of them; a cross marks each skip.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format.
    """
    check_name(file)
    keys = varied(runs)
    with canvas(file, width=7.0) as (axis,):
        for run in runs:
            name = ", ".join(f"{key}={run.overrides.get(key, '-')}" for key in keys) or run.folder.name
            steps, losses, skipped = course(run.metrics)
            (line,) = axis.plot(steps, smooth(losses), label=name, lw=1.2)
            axis.plot([step for step, _ in skipped], [loss for _, loss in skipped], "x", ms=3, color=line.get_color())
            for steps, losses in stretches(run.abandoned):
                axis.plot(steps, losses, color=line.get_color(), lw=0.5, alpha=0.5)
        axis.set(xlabel="step", ylabel="training loss, nats")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)


def course(lines: Sequence[dict]) -> tuple[list[int], list[float], list[tuple[int, float]]]:
    """Steps and losses of the applied steps, and step and loss of those that were skipped."""
    steps, losses, skipped = [], [], []
    for line in lines:
        if "train/loss" not in line:
            continue
        if not line.get("guard/applied", 1):
            skipped.append((line["step"], line["train/loss"]))
        else:
            steps.append(line["step"])
            losses.append(line["train/loss"])
    return steps, losses, skipped


def stretches(lines: Sequence[dict]) -> list[tuple[list[int], list[float]]]:
    """Steps and losses of the rolled-back lines, each attempt by itself."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    for line in lines:
        if "train/loss" in line:
            steps, losses = found.setdefault(line.get("guard/rollbacks", 0), ([], []))
            steps.append(line["step"])
            losses.append(line["train/loss"])
    return list(found.values())


def smooth(values: Sequence[float]) -> list[float]:
    """Running means that give the past `SMOOTHING`, without a bias towards the first value."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1.0
        means.append(total / weight)
    return means
