"""The page of a what-if, `whatif.html`: the ranking, and the curves of all arms over each other from the fork on."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stabletrain.beside.comparison.pages import charts
from stabletrain.beside.comparison.pages.rendering import page, write
from stabletrain.beside.whatif.ranking import RankedArm
from stabletrain.beside.whatif.report import (
    HEAD,
    WhatIfResult,
    about_table,
    between,
    command,
    cut,
    decimals,
    ended,
    rows,
    signed,
)

SCRIPTS = ["uplot.min.js", "numbers.js", "colors.js", "chart.js", "save.js", "pictures.js", "arms.js"]
STYLES = ["uplot.min.css", "page.css"]

LONGEST = 80
"""Longest text in a cell of the ranking."""

POINTS = 400
"""Maximum number of points of a curve."""


def write_whatif_page(found: WhatIfResult) -> Path:
    """Writes the page into the folder of the what-if, and returns its path; raises OSError if that fails."""
    file = found.folder / "whatif.html"
    write(whatif_page(found), file)
    return file


def whatif_page(found: WhatIfResult) -> str:
    """Returns the HTML of the page."""
    places = [*found.ranking.places, *found.first_round_only]
    curves = arm_curves(places)
    data: dict[str, Any] = {"panels": charts.panels(curves), "arms": curves}
    arms = [each.outcome.arm for each in places]
    return page(
        "whatif/page.html",
        scripts=SCRIPTS,
        styles=STYLES,
        data=data,
        title=f"{found.base.run.absolute().name} · what if",
        sentences=[
            found.ranking.verdict,
            f"The trouble: steps {found.trouble.first:,} to {found.trouble.last:,}, {found.trouble.text}.",
            f"All arms start from the state after step {found.step:,} of {found.base.run}.",
        ],
        command=command(found),
        ranking_head=HEAD,
        ranking=[(each.broke, cells) for each, cells in zip(places, rows(found), strict=True)],
        notes=about_table(found),
        has_curves=bool(curves),
        by_seed=by_seed(found) if found.seeds else None,
        arms=arms,
        refused=found.refused,
        cut=partial(cut, most=LONGEST),
    )


def arm_curves(places: Sequence[RankedArm]) -> list[dict[str, Any]]:
    """Returns the curves and marks of the arms that have a run, each with its name and the step at which it broke."""
    return [
        {
            **charts.chart_data(each.outcome.run, POINTS),
            "name": each.outcome.arm.name,
            "broke": each.outcome.step if each.outcome.broke else None,
        }
        for each in places
        if each.outcome.run is not None
    ]


def by_seed(found: WhatIfResult) -> list[tuple[bool, tuple[str, ...]]]:
    """Returns the cells of each arm with each seed, and whether it broke."""
    lines = []
    for each in found.ranking.places:
        for seed, repeat in each.repeats.items():
            cells = (
                repeat.outcome.arm.name,
                str(seed),
                ended(repeat),
                signed(repeat.difference.mean),
                between(repeat.difference),
                decimals(repeat.outcome.val_loss),
            )
            lines.append((bool(repeat.broke), cells))
    return lines
