"""The page of a comparison, `report.html`: what came of which settings, on which card, in one file that opens offline.

First the answer in words, then the table of all runs, then pictures of some of them, which the table chooses. With ten
thousand runs all are in the table and the curves of the best, the worst and those with incidents are in the page.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stabletrain.compare import sensitivity
from stabletrain.compare.pages import drawn, parts
from stabletrain.compare.pages.headline import Row, headline, name_of, plural, throughput
from stabletrain.compare.pages.rows import columns_of, plain, rank, unique
from stabletrain.compare.pages.shell import page, words, write
from stabletrain.compare.reading.run import Run
from stabletrain.compare.reading.settings import shared, telling, varied
from stabletrain.errors import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame

EMBEDDED = 300
"""Runs at most whose curves are in the page."""

NUMBERS = 400_000
"""Numbers that all curves may have together: some megabytes."""

SCRIPTS = [
    *("uplot.min.js", "tabulator.min.js", "numbers.js", "colors.js", "chart.js", "pictures.js", "grid.js", "table.js"),
    *("details.js", "compare.js"),
]
STYLES = ["uplot.min.css", "tabulator.min.css", "page.css"]


def write_page(runs: Sequence[Run], frame: "DataFrame", file: Path) -> None:
    """Writes the page of a comparison.

    Args:
        runs: as `read_runs` gives them.
        frame: one row a run, in the same order; columns that are missing are left out.
        file: in an existing folder; links in it are relative to that.

    Raises:
        ConfigError: it cannot be written.
    """
    made = comparison(runs, frame, file)
    try:
        write(made, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error}): name another file with --html") from error


def comparison(runs: Sequence[Run], frame: "DataFrame", file: Path) -> str:
    """The page as text."""
    table = [{key: plain(value) for key, value in row.items()} for row in frame.to_dict("records")]
    order = sorted(range(len(runs)), key=lambda i: rank(table[i]))
    runs, table = [runs[i] for i in order], [table[i] for i in order]
    keys = telling(runs, but=())
    names = unique([name_of(run, keys) for run in runs], runs)
    columns, rows, same = columns_of(runs, table, keys)
    chosen = embedded(runs)
    swept = [arm for arm in sensitivity.arms(runs) if sum(bool(arm.at(rate)) for rate in arm.grid) > 1]
    arms = [arm_of(arm) for arm in swept]
    points = max(40, min(400, NUMBERS // (2 * 8 * max(len(chosen), 1))))
    curves = {i: drawn.drawn(runs[i], points) for i in chosen}
    curves = {i: each for i, each in curves.items() if each["curves"]}
    above = file.parent
    about = {i: about_run(runs[i], table[i], names[i], above, i in curves) for i in range(len(runs))}
    data = {
        "columns": columns,
        "rows": rows,
        "best": 0 if table and rank(table[0])[0] == 0 else -1,
        "about": about,
        "curves": curves,
        "panels": drawn.panels(curves.values()),
        "sensitivity": {"arms": arms} if arms else None,
    }
    body = "".join(
        [
            f"<h1>{words(title(runs))}</h1>",
            parts.sentences(headline(runs, table, arms, keys)),
            parts.section("Runs", table_part(runs, same, keys)),
            parts.section("Sensitivity to the learning rate", grid_part(swept)),
            parts.section("Over the steps", parts.pictures(coloring(columns))) if curves else "",
            parts.section("Throughput by card and precision", parts.throughputs(throughput(table))),
            parts.section(
                "Incidents", parts.incidents([(names[i], one) for i in about for one in about[i]["incidents"]])
            ),
        ]
    )
    return page(title(runs), body, data, scripts=SCRIPTS, styles=STYLES)


def title(runs: Sequence[Run]) -> str:
    """What is compared: the sweeps by their folders."""
    sweeps = list(dict.fromkeys(run.folder.absolute().parent.name for run in runs))
    return f"stabletrain · {', '.join(sweeps[:3])}{' ...' if len(sweeps) > 3 else ''}"


def embedded(runs: Sequence[Run]) -> list[int]:
    """Which runs' curves go into the page: of sorted runs the best, the worst, and those with incidents."""
    if len(runs) <= EMBEDDED:
        return list(range(len(runs)))
    troubled = [i for i, run in enumerate(runs) if run.incidents][: EMBEDDED // 3]
    picked = dict.fromkeys([*troubled, *range(len(runs) - EMBEDDED // 6, len(runs)), *range(EMBEDDED)])
    return sorted([*picked][:EMBEDDED])


def about_run(run: Run, row: Row, name: str, above: Path, whole: bool) -> dict[str, Any]:
    """What is told of a run when it is asked for: its reason, page and incidents, and if `whole` its sample."""
    reason = row.get("problem") or run.problem
    about = {
        "name": name,
        "reason": reason,
        "page": drawn.link(run.folder / "report.html", above),
        "sample": drawn.sample(run, 1000) if whole else None,
    }
    return {key: value for key, value in about.items() if value} | {"incidents": drawn.told(run, above)}


def arm_of(arm: sensitivity.Arm) -> dict[str, Any]:
    """An arm: rates, mean loss with its range over the seeds, largest logit, where it diverged, its sensitivity.

    A rate of the grid at which no run is over is left out.
    """
    rates = [rate for rate in arm.grid if arm.at(rate)]
    losses = [[point.loss for point in arm.at(rate)] for rate in rates]
    logits = [[point.logit for point in arm.at(rate) if math.isfinite(point.logit)] for rate in rates]
    scores = arm.sensitivities()
    index = f"sensitivity {sensitivity.spread(scores)}" if scores else "incomplete: no sensitivity"
    return {
        "name": arm.name,
        "rates": rates,
        "loss": [drawn.rounded(statistics.fmean(each)) for each in losses],
        "loss_range": [[drawn.rounded(pick(each)) for each in losses] for pick in (min, max)],
        "logit": [drawn.rounded(max(each, default=math.nan)) for each in logits],
        "diverged": [
            [rate, drawn.rounded(point.loss), f"learning rate {rate:g}: diverged, counts as its loss at init"]
            for rate in rates
            for point in arm.at(rate)
            if point.diverged
        ],
        "sensitivity": statistics.fmean(scores) if scores else None,
        "index": index,
    }


def table_part(runs: Sequence[Run], same: dict[str, Any], keys: Sequence[str]) -> str:
    """Where the table goes, and under it what does not differ."""
    equal = shared(runs)
    others = [key for key in varied(runs) if key not in keys]
    common = {**same, **equal}
    return (
        '<div class="bar"><span id="drawn" role="status">&nbsp;</span><span class="end"></span>'
        '<button type="button" id="usual">all rows</button><button type="button" id="best">draw the best 5</button>'
        '<button type="button" id="none">draw none</button></div>'
        '<div id="table"></div>'
        '<p class="soft" style="margin-top:8px">Click a heading to sort; type under it to filter, also &gt; 1 or 2..3. '
        "Filters and ticks choose what is drawn. Shaded: the settings that differ.</p>"
        + parts.folded(f"The same in all runs: {len(common)} settings and figures", parts.facts(common))
        + parts.folded(
            f"Differs only because of the above: {len(others)} settings",
            f'<p class="code">{words(", ".join(others))}</p>' if others else "",
        )
    )


def grid_part(arms: Sequence[sensitivity.Arm]) -> str:
    """Where the sensitivity pictures go, and which runs they lack; nothing where no learning rate was swept."""
    if not arms:
        return ""
    lacking = [line for arm in arms for line in arm.missing]
    lines = "".join(f"<li>{words(line)}</li>" for line in lacking[: parts.MOST])
    return (
        "<p>How much the final loss minds the learning rate: the mean over the grid of its distance to the best, in "
        "nats (arXiv 2309.14322). 0 is best; but a model that is stuck at every rate scores 0 too, so look at the "
        "curves.</p>"
        '<div id="sensitivity"></div>'
        + parts.folded(f"{plural(len(lacking), 'run')} missing", f'<ul class="words">{lines}</ul>' if lines else "")
    )


def coloring(columns: Sequence[dict[str, Any]]) -> str:
    """What chooses the colours: a setting that differs, or each run by itself."""
    fields = [(c, str(column["title"])) for c, column in enumerate(columns) if column.get("setting")]
    usual = next((c for c, title in fields if title not in ("seed", sensitivity.RATE)), None)
    usual = next((c for c, title in fields if title != "seed"), -1) if usual is None else usual
    shown = [(c, title) for c, title in fields] + [
        (c, str(column["title"]))
        for c, column in enumerate(columns)
        if column["title"] in ("card", "precision", "status")
    ]
    options = "".join(
        f'<option value="{c}"{" selected" if c == usual else ""}>{words(title)}</option>'
        for c, title in [*shown, (-1, "run")]
    )
    return f'<label>colour by <select id="by">{options}</select></label>'
