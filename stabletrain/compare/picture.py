"""The curves behind a sensitivity table: final loss, and largest attention logit, against the learning rate."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stabletrain.compare.sensitivity import Arm
from stabletrain.errors import ConfigError

FORMATS = (".svg", ".png", ".pdf")


def draw(found: Sequence[Arm], file: Path) -> None:
    """Writes the picture; its ending, such as .svg or .png, decides the format.

    Each line is the mean over the seeds, its band the lowest to the highest; a cross marks each run that diverged.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format.
    """
    check_name(file)
    seen = any(not math.isnan(point.logit) for arm in found for curve in arm.curves.values() for point in curve)
    panels = [("final loss (or that at init), nats", "loss"), ("largest attention logit", "logit")][: 2 if seen else 1]
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
            axes[1].axhline(1e4, color="grey", lw=0.8, ls="--")
        axes[0].legend(fontsize=8)


@contextmanager
def canvas(file: Path, *, width: float, panels: int = 1) -> Generator[list[Any], None, None]:
    """Axes side by side to draw on; what is drawn within is written to `file`, the same bytes for the same drawing.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError('a picture needs matplotlib: pip install "stabletrain[picture]"') from None
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "stabletrain"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width, 3.6), squeeze=False)
    yield list(axes[0])
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def check_name(file: Path) -> None:
    """Refuses a file that could not be written."""
    if file.suffix not in FORMATS:
        raise ConfigError(f"{file}: the ending says the format: use {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}: make it first")
