"""The page of a comparison: one file that opens offline.

The page begins with a summary in sentences. A table of all runs and charts follow; the table selects the runs to draw.
If a setting or result is the same in all runs, it is not a column. If there are many runs, the page contains only the
curves of the best, the worst and those with incidents.
"""

import hashlib
import math
import numbers
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stabletrain.beside.comparison import sensitivity
from stabletrain.beside.comparison.by_setting import settings_of
from stabletrain.beside.comparison.groups import groups
from stabletrain.beside.comparison.pages import charts
from stabletrain.beside.comparison.pages.charts import rounded
from stabletrain.beside.comparison.pages.headline import FEW, Row, headline, is_number, name_of, throughput
from stabletrain.beside.comparison.pages.rendering import page, write
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.settings import (
    Value,
    distinguishing_keys,
    override_value,
    shared_settings,
    value_of,
    varying_keys,
    without_implied,
)
from stabletrain.errors import ConfigError
from stabletrain.stored.json_files import read_file
from stabletrain.tracking.columns import COLUMNS, ON_PAGE

ALWAYS = ("status", "val_loss", "incidents")
"""Columns that are shown even if all runs have the same value."""


def rank(row: Row) -> tuple[int, float]:
    """Returns a sort key: finished runs by loss, then unfinished, then failed or diverged, then unreadable runs."""
    order = {"finished": 0, "running": 1, "preempted": 1, "halted": 2, "failed": 3}
    place = 2 if row.get("diverged") else order.get(str(row.get("status")), 4)
    loss = row.get("val_loss")
    return (place if place or loss is not None else 2, math.inf if loss is None else float(loss))


def unique_names(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Adds the run's name to each name that several runs share."""
    known = Counter(names)
    return [
        f"{name} ({run.name})" if known[name] > 1 and name != run.name else name
        for name, run in zip(names, runs, strict=True)
    ]


def columns_of(
    runs: Sequence[Run], table: Sequence[Row], keys: Sequence[str]
) -> tuple[list[dict[str, Any]], list[list[Any]], dict[str, Any]]:
    """Returns the table's columns, its rows, and the values that all rows have in common, which are not columns."""
    results: list[tuple[dict[str, Any], Sequence[Any]]] = []
    same = {}
    for column in (COLUMNS[name] for name in ON_PAGE):
        name, heading = column.name, "steps done" if column.name == "steps" and "steps" in keys else column.page_head
        more = ({"about": column.about} if column.about else {}) | dict.fromkeys(column.page, True)
        values = [row.get(name) for row in table]
        distinct = {*values}
        if name == "sweep" and any(run.label for run in runs):  # the runs' names contain it
            continue
        if distinct <= {None} or (distinct <= {None, 0} and name not in ALWAYS):
            continue
        if len(distinct) == 1 and len(runs) > 1 and name not in ALWAYS:
            same[heading] = values[0]
            continue
        results.append(({"title": heading, "kind": column_kind(values), **more}, values))
    typed = [(key, as_numbers_or_texts([setting(value_of(run, key)) for run in runs])) for key in keys]
    settings = [({"title": key, "kind": column_kind(values), "setting": True}, values) for key, values in typed]
    # Many settings would push the results far to the right.
    others = [*settings, *results] if len(keys) <= FEW else [*results, *settings]
    first = {"title": "run", "kind": "text", "name": True}
    columns, cells = zip((first, [run.name for run in runs]), *others, strict=True)
    return [*columns], [list(row) for row in zip(*cells, strict=True)], same


def setting(value: Value) -> Any:
    """Converts a setting to a number or text."""
    value = override_value(value) if isinstance(value, str) else value
    return str(value).lower() if isinstance(value, bool) else value


def as_numbers_or_texts(values: Sequence[Any]) -> list[Any]:
    """Converts all values to text, unless all are numbers."""
    if all(value is None or is_number(value) for value in values):
        return list(values)
    return [None if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values]


def column_kind(values: Sequence[Any]) -> str:
    """Returns `number` if all values are numbers or None, else `text`."""
    return "number" if all(value is None or is_number(value) for value in values) else "text"


def plain(value: Any) -> Any:
    """Converts a cell of the frame to a JSON value; None if it is missing."""
    if type(value) is float:
        return rounded(value)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return rounded(float(value))
    if hasattr(value, "item"):
        return plain(value.item())
    return None if type(value).__name__ in ("NAType", "NaTType") else str(value)


if TYPE_CHECKING:
    from pandas import DataFrame

EMBEDDED = 300
"""Maximum number of runs whose curves are in the page."""

COLORS = 8
"""Number of colours of lines (`colors.js`). So many runs have each their own at first."""

NUMBERS = 400_000
"""Maximum number of values in all curves together, to limit the page to a few megabytes."""

SCRIPTS = [
    *(
        "uplot.min.js",
        "tabulator.min.js",
        "numbers.js",
        "colors.js",
        "chart.js",
        "save.js",
        "pictures.js",
        "grid.js",
        "table.js",
    ),
    *("details.js", "compare.js"),
]
STYLES = ["uplot.min.css", "tabulator.min.css", "page.css"]


def hash_of_folders(folders: Sequence[Path], file: Path) -> str:
    """Returns a hash of the folders' paths relative to the page: it stays the same if all of them move together."""
    places = {os.path.relpath(os.path.realpath(folder), os.path.realpath(file.parent)) for folder in folders}
    return hashlib.sha256("\n".join(sorted(places)).encode("utf-8", "surrogateescape")).hexdigest()


def is_another_page(file: Path, folders: Sequence[Path]) -> bool:
    """Returns whether `file` exists and is not the page of these folders."""
    try:
        return hash_of_folders(folders, file).encode() not in read_file(file)[:4096]
    except FileNotFoundError:
        return False
    except OSError:
        return not file.is_dir()  # a folder is no page, and cannot be written


def write_page(runs: Sequence[Run], frame: "DataFrame", file: Path, folders: Sequence[Path] = ()) -> None:
    """Writes the page of a comparison.

    Args:
        frame: one row per run, in the same order; the page omits columns that are missing.
        file: the page to write, in an existing folder; links on the page are relative to this folder.
        folders: the folders that were compared; the page is recognized by them (`is_another_page`).

    Raises:
        ConfigError: the page cannot be written.
    """
    made = comparison(runs, frame, file, hash_of_folders(folders, file))
    try:
        write(made, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error}): name another file with --html") from error


def comparison(runs: Sequence[Run], frame: "DataFrame", file: Path, inputs: str) -> str:
    """Returns the HTML of the page; see `write_page` and `hash_of_folders`."""
    table = [{key: plain(value) for key, value in row.items()} for row in frame.to_dict("records")]
    settings_compared = settings_of(frame) if len(frame) > 1 else []
    order = sorted(range(len(runs)), key=lambda i: rank(table[i]))
    runs, table = [runs[i] for i in order], [table[i] for i in order]
    keys = distinguishing_keys(runs, but=())
    naming = keys if len(keys) <= FEW else without_implied(runs, keys)
    names = unique_names([name_of(run, naming) for run in runs], runs)
    columns, rows, same = columns_of(runs, table, keys)
    chosen = runs_with_curves(runs)
    swept = [arm for arm in sensitivity.arms(runs) if sum(bool(arm.at(rate)) for rate in arm.grid) > 1]
    arms = [arm_values(arm) for arm in swept]
    # Each point has an x and a y, and a run is taken to have about 8 curves.
    points = max(40, min(400, NUMBERS // (2 * 8 * max(len(chosen), 1))))
    curves = {i: charts.chart_data(runs[i], points) for i in chosen}
    curves = {i: each for i, each in curves.items() if each["curves"]}
    made = mean_curves(runs, curves, points)
    above = file.parent
    about = {i: about_run(runs[i], table[i], names[i], above, i in curves) for i in range(len(runs))}
    data = {
        "columns": columns,
        "rows": rows,
        "best": 0 if table and rank(table[0])[0] == 0 else -1,
        "about": about,
        "curves": curves,
        "groups": made,
        "panels": charts.panels(curves.values()),
        "sensitivity": {"arms": arms} if arms else None,
    }
    titles = [(c, str(column["title"])) for c, column in enumerate(columns)]
    settings = [(c, title) for c, title in titles if columns[c].get("setting")]
    others = [(c, title) for c, title in titles if title in ("card", "precision", "status")]
    return page(
        "comparison/pages/templates/comparison.html",
        scripts=SCRIPTS,
        styles=STYLES,
        data=data,
        inputs=inputs,
        title=title(runs),
        headline=headline(runs, table, arms, naming, settings_compared),
        common={**same, **shared_settings(runs)},
        dependent=[key for key in varying_keys(runs) if key not in keys],
        swept=bool(swept),
        missing=[line for arm in swept for line in arm.missing],
        has_curves=bool(curves),
        has_means=bool(made),
        colors=[*settings, *others, (-1, "run")],
        usual_color=-1 if len(curves) <= COLORS else usual_color(settings),
        throughputs=with_shares(throughput(table)),
        incidents=[(names[i], one) for i in about for one in about[i]["incidents"]],
    )


def mean_curves(runs: Sequence[Run], curves: Mapping[int, Any], points: int) -> list[dict[str, Any]]:
    """Returns the settings with their mean curves, or none if no setting has several runs.

    A setting has its `name` with the number of runs, the numbers of the runs in the mean (`sound`) and of the `others`
    on the page, its `curves`, and the number of runs in the mean that have marks (`marked`). If the page has not the
    curves of all of its runs, it has no mean.
    """
    number = {id(run): i for i, run in enumerate(runs)}
    found: list[dict[str, Any]] = []
    for group in groups(runs):
        sound, others = [
            [number[id(run)] for run in members] for members in (group.sound, (*group.broke, *group.not_over))
        ]
        whole = all(i in curves for i in sound)
        found.append(
            {
                "name": group.title if whole else f"{group.name} (no mean: too many runs for this page)",
                "sound": sound if whole else [],
                "others": [i for i in (others if whole else [*sound, *others]) if i in curves],
                "curves": charts.mean_data(group.sound, points) if whole and len(sound) > 1 else {},
                "marked": sum(bool(run.skips or run.rollbacks or run.forecasts) for run in group.sound),
            }
        )
    if all(len(each["sound"]) < 2 for each in found):
        return []
    return [each for each in found if each["sound"] or each["others"]]


def title(runs: Sequence[Run]) -> str:
    """Returns the title: the folder names of the sweeps."""
    sweeps = list(dict.fromkeys(run.folder.absolute().parent.name for run in runs))
    return f"stabletrain · {', '.join(sweeps[:3])}{' ...' if len(sweeps) > 3 else ''}"


def runs_with_curves(runs: Sequence[Run]) -> list[int]:
    """Selects the sorted runs whose curves go into the page: the best, the worst, and those with incidents."""
    if len(runs) <= EMBEDDED:
        return list(range(len(runs)))
    troubled = [i for i, run in enumerate(runs) if run.incidents][: EMBEDDED // 3]
    picked = dict.fromkeys([*troubled, *range(len(runs) - EMBEDDED // 6, len(runs)), *range(EMBEDDED)])
    return sorted([*picked][:EMBEDDED])


def about_run(run: Run, row: Row, name: str, above: Path, whole: bool) -> dict[str, Any]:
    """Returns the details of a run: its problem, page and incidents, and its sample if `whole`."""
    reason = row.get("problem") or run.problem
    about = {
        "name": name,
        "reason": reason,
        "page": charts.link(run.folder / "report.html", above),
        "sample": charts.sample(run, 1000) if whole else None,
    }
    return {key: value for key, value in about.items() if value} | {"incidents": charts.incident_rows(run, above)}


def arm_values(arm: sensitivity.Arm) -> dict[str, Any]:
    """Converts an arm to JSON values: losses, logits and diverged runs by learning rate, and its sensitivity.

    Leaves out learning rates at which no run is over.
    """
    rates = [rate for rate in arm.grid if arm.at(rate)]
    losses = [[point.loss for point in arm.at(rate)] for rate in rates]
    logits = [[point.logit for point in arm.at(rate) if math.isfinite(point.logit)] for rate in rates]
    scores = arm.sensitivities()
    index = f"sensitivity {sensitivity.spread(scores)}" if scores else "incomplete grid: no sensitivity"
    return {
        "name": arm.name,
        "n": len(arm.curves),
        "rates": rates,
        "loss": [charts.rounded(statistics.fmean(each)) for each in losses],
        "loss_range": [[charts.rounded(pick(each)) for each in losses] for pick in (min, max)],
        "logit": [charts.rounded(max(each, default=math.nan)) for each in logits],
        "diverged": [
            [rate, charts.rounded(point.loss), f"learning rate {rate:g}: diverged, counted as its loss at init"]
            for rate in rates
            for point in arm.at(rate)
            if point.diverged
        ],
        "sensitivity": statistics.fmean(scores) if scores else None,
        "by_seed": arm.by_seed(),
        "index": index,
    }


def usual_color(settings: Sequence[tuple[int, str]]) -> int:
    """Returns the column that the colours show at first: a setting that differs, or -1 for the run."""
    usual = next((c for c, title in settings if title not in ("seed", sensitivity.RATE)), None)
    return next((c for c, title in settings if title != "seed"), -1) if usual is None else usual


def with_shares(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the length of each group's bar: in percent of the fastest with the same unit."""
    longest = {
        unit: max(group["median"] for group in groups if group["unit"] == unit) for unit in {g["unit"] for g in groups}
    }
    return [{**group, "share": 100 * group["median"] / longest[group["unit"]]} for group in groups]
