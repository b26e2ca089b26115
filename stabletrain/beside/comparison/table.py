"""The comparison on a terminal: one row per run or per group of seeds, the best first.

Values that all rows have in common are printed once, above the table. Columns that do not fit are left out, the least
important first, and named below the table. In a pipe, all columns are printed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stabletrain.beside.comparison.reading.settings import setting_text
from stabletrain.errors import ConfigError
from stabletrain.printable import one_line
from stabletrain.tracking.columns import BY_IMPORTANCE, COLUMNS, IN_TABLE


def cell_text(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Formats the values of every column; a missing value is an empty string."""
    found = {"run": [short_run_names(str(name)) for name in rows["run"]]}
    for key in rows.attrs["telling"]:
        if f"settings.{key}" in rows:
            found[f"settings.{key}"] = [
                setting_text(None if is_missing(value) else value) for value in rows[f"settings.{key}"]
            ]
    if "n" not in rows and rows["seed"].nunique() > 1:
        found["seed"] = ["" if is_missing(seed) else str(seed) for seed in rows["seed"]]
    named = rows["run"].str.contains("/").any()  # the runs' names contain that of the sweep
    for name in IN_TABLE:
        if name in rows and not (name == "sweep" and named):
            text = COLUMNS[name].text
            found[name] = ["" if is_missing(value) else text(value) for value in values(rows[name])]
    found["diverged"] = ["" if not count else str(int(count)) if "n" in rows else "yes" for count in rows["diverged"]]
    if "settings.precision" in found:  # show the precision the run used, not the setting, which may be auto
        found["settings.precision"] = found.pop("precision")
    if "n" in rows and rows["n"].max() > 1:
        pairs = zip(rows["val_loss_min"], rows["val_loss_max"], rows["finished"], strict=True)
        found["range"] = ["" if n < 2 or is_missing(low) else f"{low:.4f}-{high:.4f}" for low, high, n in pairs]
    return {name: [one_line(word) for word in words] for name, words in found.items()}


def values(column: pd.Series) -> list[Any]:
    """Converts a column to Python scalars."""
    return [value.item() if hasattr(value, "item") else value for value in column.tolist()]


def is_missing(value: Any) -> bool:
    """Returns whether a cell is empty."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def short_run_names(names: str, most: int = 12) -> str:
    """Returns the run names of a group, or the first one and the number of the others."""
    first, _, rest = names.partition(", ")
    return names if len(names) <= most or not rest else f"{first} +{rest.count(', ') + 1}"


ENDLESS = 10**5
"""Width of a console without a width limit."""

SHARED = (
    *(
        "status",
        "cause",
        "incidents",
        "forecasts",
        "skips",
        "rollbacks",
        "healings",
        "spike_score",
        "card",
        "precision",
    ),
    *("steps", "parameters", "sweep", "diverged"),
)
"""Columns that are printed once above the table, in this order, if all rows have the same value."""

ALWAYS = ("run", "val_loss")
"""Columns that are never left out."""

BEST = {"val_loss": min, "best_val_loss": min, "val_accuracy": max}
"""Columns whose best value is marked, and the function that picks it."""


def ranked(rows: pd.DataFrame, by: str | None) -> pd.DataFrame:
    """Sorts the rows.

    Args:
        rows: from `frame` or `by_seed`.
        by: a column or the key of a setting. None sorts by how the run ended (finished, not over, diverged, unreadable)
            and then by validation loss.

    Raises:
        ConfigError: the column does not exist.
    """
    if by is None:
        ranks = [rank(status, diverged) for status, diverged in zip(rows["status"], rows["diverged"], strict=True)]
        order = pd.DataFrame({"rank": ranks, "loss": rows["val_loss"]}, index=rows.index)
        return rows.loc[order.sort_values(["rank", "loss"], kind="stable").index]
    name = by if by in rows.columns else f"settings.{by}"
    if name not in rows.columns:
        raise ConfigError(f"--sort {by}: there is no such column: use one of {', '.join(rows.columns)}")
    key = None if pd.api.types.is_numeric_dtype(rows[name]) else lambda column: column.map(str, na_action="ignore")
    return rows.sort_values(
        name, ascending=not (name in COLUMNS and COLUMNS[name].higher_is_better), kind="stable", key=key
    )


def rank(status: str, diverged: int | bool) -> int:
    """Returns 0 for runs that ended well, 1 if not over or failed, 2 if diverged, 3 if unreadable or empty."""
    if diverged:
        return 2
    if "broken" in status or "empty" in status:
        return 3
    return 1 if any(word in status for word in ("running", "preempted", "failed")) else 0


def show(rows: pd.DataFrame, console: Console, most: int = 0) -> None:
    """Prints the table.

    Args:
        rows: sorted, from `frame` or `by_seed`, with their `attrs`.
        most: number of rows to print; 0 for all.
    """
    cells = {name: words for name, words in cell_text(rows).items() if any(words)}
    shareable = [name for name in SHARED if name in cells]
    same = {name: cells[name][0] for name in shareable if len(set(cells[name])) == 1}
    if len(rows) == 1:  # a single row has everything in common with itself, so keep its columns
        same = {}
    heads = headings(rows)
    settings = [name for name in cells if name.startswith("settings.") or name == "seed"]
    names = ["run", *settings, *(name for name in IN_TABLE if name in cells and name not in same)]
    printed = len(rows) if most == 0 else min(most, len(rows))
    marked = {name: best_row(rows, name) for name in names if name in BEST}
    dropped: list[str] = []
    while True:  # leave out one column at a time until the table fits
        table = build(names, heads, cells, marked, printed)
        needed = console.measure(table, options=console.options.update(width=ENDLESS)).maximum
        least = next((name for name in columns_to_drop(names, cells)), None)
        if needed <= console.width or least is None:
            break
        names.remove(least)
        dropped.append(heads[least])
    console.print(Text(sentence(rows, same, heads)))
    console.print(table)
    if printed < len(rows):
        console.print(Text(f"{len(rows) - printed:,} more rows: --rows 0 shows all, --csv <file> writes them"))
    if dropped:
        console.print(Text(f"columns that do not fit: {', '.join(reversed(dropped))}; --wide shows them"))


def in_one_line(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with the control characters in its texts and headings escaped."""
    shown = rows.map(lambda value: one_line(value) if isinstance(value, str) else value)
    shown.columns = [one_line(str(name)) for name in rows.columns]
    shown.index = rows.index.map(lambda value: one_line(str(value)))
    return shown.rename_axis(rows.index.name)


def columns_to_drop(names: Sequence[str], cells: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the columns that may be left out, the least important first.

    These are the settings that follow from other settings, then the measurements, then the remaining settings.
    """
    settings = [name for name in names if name.startswith("settings.")]
    idle, kept = [], []
    for name in settings:
        rows = list(zip(*(cells[other] for other in kept), strict=True)) if kept else [()] * len(cells[name])
        values = set(zip(rows, cells[name], strict=True))
        (idle if len(values) == len(set(rows)) else kept).append(name)
    measured = sorted((name for name in names if name in BY_IMPORTANCE and name not in ALWAYS), key=BY_IMPORTANCE.index)
    return [*reversed(idle), *reversed(measured), *reversed(kept)]


def headings(rows: pd.DataFrame) -> dict[str, str]:
    """Returns the heading of each column."""
    units = set(rows["unit"].dropna())
    heads = (
        {name: COLUMNS[name].head for name in IN_TABLE}
        | {name: name.removeprefix("settings.") for name in rows.columns if name.startswith("settings.")}
        | {"seed": "seed", "run": "runs" if "n" in rows and rows["n"].max() > 1 else "run"}
        | ({"steps": "steps done"} if "settings.steps" in rows else {})
        | {"units_per_s": f"{units.pop() if len(units) == 1 else 'units'}/s"}
    )
    return {name: one_line(head) for name, head in heads.items()}


def build(
    names: Sequence[str],
    heads: Mapping[str, str],
    cells: Mapping[str, Sequence[str]],
    marked: Mapping[str, int | None],
    printed: int,
) -> Table:
    """Builds the table. The best value of a marked column is bold and has a star."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in names:
        numbers = name in IN_TABLE and COLUMNS[name].dtype != "object"
        table.add_column(heads[name], justify="right" if numbers else "left", overflow="fold")
    for row in range(printed):
        table.add_row(*(cell(cells[name][row], name in marked, marked.get(name) == row) for name in names))
    return table


def cell(word: str, can_be_best: bool, is_best: bool) -> Text:
    """Formats a value. A column that can have a best value leaves room for the star."""
    return Text(f"{word}{' *' if is_best else '  '}" if can_be_best else word, style="bold green" if is_best else "")


def best_row(rows: pd.DataFrame, name: str) -> int | None:
    """Returns the row with the best value among runs that ended well, or None if fewer than two did."""
    values = {
        row: value
        for row, (value, status, diverged) in enumerate(zip(rows[name], rows["status"], rows["diverged"], strict=True))
        if rank(status, diverged) == 0 and not is_missing(value)
    }
    return BEST[name](values, key=lambda row: values[row]) if len(values) > 1 else None


def sentence(rows: pd.DataFrame, same: Mapping[str, str], heads: Mapping[str, str]) -> str:
    """Returns a line with the number of runs and what they have in common, including overridden settings."""
    count = int(rows["n"].sum()) if "n" in rows else len(rows)
    parts = [f"{count:,} run{'s' if count != 1 else ''}"]
    parts += [f"{heads[name]} {word}" for name, word in same.items() if name != "status"]
    if "status" in same:
        parts.insert(1, same["status"])
    shared, typed = rows.attrs["shared"], rows.attrs["typed"]
    words = [f"{key}={setting_text(shared[key])}" for key in typed if key in shared]
    return one_line(" · ".join([*parts, *([f"all with {' '.join(words)}"] if words else [])]))
