"""The pictures of docs/evidence/foresight.md: recall against false alarms, stated against actual times of crossings."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stabletrain.beside.comparison.pictures import canvas
from stabletrain.beside.forecast.model import fitted
from tests.reliability.foresight.fit import statements
from tests.reliability.foresight.looks import Watched
from tests.reliability.foresight.score import summary, threshold_at
from tests.reliability.foresight.tables import detectors, sets, verdicts

RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""False alarms in 1,000 steps."""

SHOWN = ("forecast", "learning rate and knobs", "attention logit", "loss", "random")


def draw_all(runs: Sequence[Watched], folder: Path) -> list[Path]:
    """Draws all pictures; returns their files."""
    files = [folder / "foresight_recall.svg", folder / "foresight_crossings.svg"]
    draw_recall(runs, files[0])
    draw_crossings(runs, files[1])
    return files


def draw_recall(runs: Sequence[Watched], file: Path) -> None:
    """Draws recall at several rates of false alarms, for the forecast and some baselines."""
    given = sets(runs)
    found = detectors(runs, given, fitted())
    panels = [
        ("fitted families: breaks", given.test, "recall_breaks"),
        ("fitted: ends worse", given.test, "recall_worse"),
        ("held out: breaks", given.held_out, "recall_breaks"),
        ("held out: ends worse", given.held_out, "recall_worse"),
    ]
    with canvas(file, width=13.0, panels=len(panels)) as axes:
        for axis, (title, chosen, of) in zip(axes, panels, strict=True):
            for name in SHOWN:
                recalls = [
                    summary(verdicts(chosen, found[name], threshold_at(rate, given.choosing, found[name])))[of]
                    for rate in RATES
                ]
                axis.plot(RATES, recalls, marker="o", ms=3, lw=2 if name == "forecast" else 1, label=name)
            axis.set(xscale="log", ylim=(-0.03, 1.03), title=title, xlabel="false alarms in 1,000 steps")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("recall")
        axes[0].legend(fontsize=8)


def draw_crossings(runs: Sequence[Watched], file: Path) -> None:
    """Draws the steps until a crossing, as stated first and as they were."""
    given, model = sets(runs), fitted()
    with canvas(file, width=5.0) as (axis,):
        for name, chosen in (("fitted families", given.test), ("held-out families", given.held_out)):
            pairs = [
                (left, each.crossed[key] - step)
                for each in chosen
                for key, (step, left) in statements(each).items()
                if key in each.crossed and each.crossed[key] > step
            ]
            stated, actual = np.array(pairs, float).reshape(-1, 2).T
            axis.plot(stated, actual, "o", ms=3, alpha=0.6, label=f"{name} ({len(pairs)})")
        line = np.array([10.0, 500.0])
        axis.plot(line, line, color="black", lw=0.8)
        axis.fill_between(
            line, model.earliest * line, model.latest * line, color="grey", alpha=0.2, label="80 % interval"
        )
        axis.set(xscale="log", yscale="log", xlabel="steps until the crossing, as stated", ylabel="steps, as they were")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
