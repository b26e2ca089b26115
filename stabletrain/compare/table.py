"""The comparison on a terminal: which columns it has, and how they are printed.

The columns that a comparison's table may have: their heads, their values in words, and which of them matter most.

The comparison on a terminal: a row a run, or a group of seeds, the best first; what is the same everywhere above it.

Columns that do not fit are left out, the least important first, and named. In a pipe there is no width to fit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stabletrain.compare.reading.settings import shown
from stabletrain.errors import ConfigError


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        name: of the frame.
        head: what stands above it.
        word: a value in words.
        right: whether numbers are aligned at their right end.
    """

    name: str
    head: str
    word: Callable[[Any], str]
    right: bool = True


def plain(value: Any) -> str:
    """A name, or a whole number."""
    return str(value)


def digits(places: int) -> Callable[[float], str]:
    """So many digits after the point."""
    return lambda value: f"{value:.{places}f}"


def three_digits(value: float) -> str:
    """Three digits that count."""
    return f"{value:.3g}"


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.1f} %" if value >= 1e-3 or value == 0 else f"{100 * value:.2g} %"


def thousands(value: float | int) -> str:
    """950, 14.6k, 1.2M."""
    return f"{value / 1e6:.3g}M" if value >= 1e6 else f"{value / 1e3:.3g}k" if value >= 1e3 else f"{value:.3g}"


def duration(value: float | int) -> str:
    """48 s, 12 min, 3.4 h."""
    return f"{value / 3600:.1f} h" if value >= 3600 else f"{value / 60:.0f} min" if value >= 600 else f"{value:.0f} s"


COLUMNS = (
    Column("val_loss", "val loss", digits(4)),
    Column("range", "lowest-highest", plain),
    Column("best_val_loss", "best", digits(4)),
    Column("val_accuracy", "accuracy", percent),
    Column("sensitivity", "sensitivity", digits(3)),
    Column("diverged", "diverged", plain),
    Column("status", "status", plain, right=False),
    Column("cause", "first cause", plain, right=False),
    Column("incidents", "incidents", plain),
    Column("skips", "skips", plain),
    Column("rollbacks", "rollbacks", plain),
    Column("spike_score", "spikes", percent),
    Column("units_per_s", "/s", thousands),
    Column("mfu", "MFU", percent),
    Column("peak_memory_gb", "peak GB", three_digits),
    Column("card", "card", plain, right=False),
    Column("precision", "precision", plain, right=False),
    Column("steps", "steps", plain),
    Column("parameters", "parameters", thousands),
    Column("seconds", "time", duration),
    Column("sweep", "sweep", plain, right=False),
)
"""Those that a table may have beside the run's name and its settings, the most important first."""

BY_IMPORTANCE = (
    *("card", "precision", "status", "val_loss", "cause", "range", "best_val_loss", "val_accuracy", "diverged"),
    *("sensitivity", "spike_score", "units_per_s", "skips", "rollbacks", "incidents", "mfu", "peak_memory_gb"),
    *("seconds", "steps", "sweep", "parameters"),
)
"""What is kept where not everything fits, the most important first: what differs in hardware, then how it ended."""

CAN_BE_SHARED = ("status", "cause", "incidents", "skips", "rollbacks", "spike_score", "card", "precision", "steps",
                 "parameters", "sweep", "diverged")  # fmt: skip
"""Columns that are said once, above the table, where they are the same in all rows."""


def cell_text(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Every column of the table in words, `""` for what is missing."""
    found = {"run": [short(str(name)) for name in rows["run"]]}
    for key in rows.attrs["telling"]:
        if f"settings.{key}" in rows:
            found[f"settings.{key}"] = [setting(value) for value in rows[f"settings.{key}"]]
    if "n" not in rows and rows["seed"].nunique() > 1:
        found["seed"] = ["" if missing(seed) else str(seed) for seed in rows["seed"]]
    for column in COLUMNS:
        if column.name in rows:
            found[column.name] = ["" if missing(value) else column.word(value) for value in values(rows[column.name])]
    found["diverged"] = ["" if not count else str(int(count)) if "n" in rows else "yes" for count in rows["diverged"]]
    if "settings.precision" in found:  # what it ran in says more than what was asked for, such as auto
        found["settings.precision"] = found.pop("precision")
    if "n" in rows and rows["n"].max() > 1:
        pairs = zip(rows["val_loss_min"], rows["val_loss_max"], rows["finished"], strict=True)
        found["range"] = ["" if n < 2 or missing(low) else f"{low:.4f}-{high:.4f}" for low, high, n in pairs]
    return found


def values(column: pd.Series) -> list[Any]:
    """A column's values as Python's own."""
    return [value.item() if hasattr(value, "item") else value for value in column.tolist()]


def missing(value: Any) -> bool:
    """Whether a cell holds nothing."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def setting(value: Any) -> str:
    """A setting in a cell."""
    return shown(None if missing(value) else value)


def short(names: str, most: int = 12) -> str:
    """The names of a group's runs: all, or the first and how many more."""
    first, _, rest = names.partition(", ")
    return names if len(names) <= most or not rest else f"{first} +{rest.count(', ') + 1}"


ENDLESS = 10**5
"""Columns of a terminal that is never full."""

HIGHER_IS_BETTER = ("val_accuracy", "units_per_s", "mfu")


ALWAYS = ("run", "val_loss")
"""Columns that are never left out; nor are the settings."""

BEST = {"val_loss": min, "best_val_loss": min, "val_accuracy": max}
"""Columns whose best value is marked."""


def ranked(rows: pd.DataFrame, by: str | None) -> pd.DataFrame:
    """The rows in their order.

    Args:
        rows: from `frame` or `by_seed`.
        by: a column; None puts what finished first, by validation loss, then what is not over, what diverged, and what
            cannot be read.

    Raises:
        ConfigError: there is no such column.
    """
    if by is None:
        ranks = [rank(status, diverged) for status, diverged in zip(rows["status"], rows["diverged"], strict=True)]
        order = pd.DataFrame({"rank": ranks, "loss": rows["val_loss"]}, index=rows.index)
        return rows.loc[order.sort_values(["rank", "loss"], kind="stable").index]
    name = by if by in rows.columns else f"settings.{by}"
    if name not in rows.columns:
        raise ConfigError(f"--sort {by}: there is no such column: use one of {', '.join(rows.columns)}")
    key = None if pd.api.types.is_numeric_dtype(rows[name]) else lambda column: column.map(str, na_action="ignore")
    return rows.sort_values(name, ascending=name not in HIGHER_IS_BETTER, kind="stable", key=key)


def rank(status: str, diverged: int | bool) -> int:
    """0 for what ended well, 1 for what is not over or failed, 2 for what diverged, 3 for what cannot be read."""
    if diverged:
        return 2
    if "broken" in status or "empty" in status:
        return 3
    return 1 if any(word in status for word in ("running", "preempted", "failed")) else 0


def show(rows: pd.DataFrame, console: Console, most: int = 0) -> None:
    """Prints the table.

    Args:
        rows: in their order, from `frame` or `by_seed`, with their `attrs`.
        console: into whose width it is to fit.
        most: rows that are printed; 0 for all.
    """
    cells = {name: words for name, words in cell_text(rows).items() if any(words)}
    same = {name: cells[name][0] for name in CAN_BE_SHARED if name in cells and len(set(cells[name])) == 1}
    if len(rows) == 1:
        same = {}
    heads = headings(rows)
    settings = [name for name in cells if name.startswith("settings.") or name == "seed"]
    names = ["run", *settings, *(c.name for c in COLUMNS if c.name in cells and c.name not in same)]
    printed = len(rows) if most == 0 else min(most, len(rows))
    marked = {name: best_row(rows, name) for name in names if name in BEST}
    dropped: list[str] = []
    while True:
        table = build(names, heads, cells, marked, printed)
        needed = console.measure(table, options=console.options.update(width=ENDLESS)).maximum
        least = next((name for name in first_to_drop(names, cells)), None)
        if needed <= console.width or least is None:
            break
        names.remove(least)
        dropped.append(heads[least])
    console.print(Text(sentence(rows, same, heads)))
    console.print(table)
    if printed < len(rows):
        console.print(Text(f"{len(rows) - printed:,} more rows: --rows 0 shows all, --csv <file> writes them"))
    if dropped:
        console.print(Text(f"left out, for want of width: {', '.join(reversed(dropped))}; --wide shows them"))


def first_to_drop(names: Sequence[str], cells: Mapping[str, Sequence[str]]) -> list[str]:
    """The columns that can be left out, the first to go first.

    First come settings that follow from those before them, then what was measured, then what else differs.
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
    """What stands above each column."""
    units = set(rows["unit"].dropna())
    return (
        {column.name: column.head for column in COLUMNS}
        | {name: name.removeprefix("settings.") for name in rows.columns if name.startswith("settings.")}
        | {"seed": "seed", "run": "runs" if "n" in rows and rows["n"].max() > 1 else "run"}
        | {"units_per_s": f"{units.pop() if len(units) == 1 else 'units'}/s"}
    )


def build(
    names: Sequence[str],
    heads: Mapping[str, str],
    cells: Mapping[str, Sequence[str]],
    marked: Mapping[str, int | None],
    printed: int,
) -> Table:
    """The table with these columns; the best value of each that has one is bold, and has a star."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    aligned = {column.name: column.right for column in COLUMNS}
    for name in names:
        table.add_column(heads[name], justify="right" if aligned.get(name) else "left", overflow="fold")
    for row in range(printed):
        table.add_row(*(cell(cells[name][row], name in marked, marked.get(name) == row) for name in names))
    return table


def cell(word: str, can_be_best: bool, is_best: bool) -> Text:
    """A value; in a column that has a best one there is room for its star."""
    return Text(f"{word}{' *' if is_best else '  '}" if can_be_best else word, style="bold green" if is_best else "")


def best_row(rows: pd.DataFrame, name: str) -> int | None:
    """The row with the best value among those that ended well; None where there are not two to choose from."""
    values = {
        row: value
        for row, (value, status, diverged) in enumerate(zip(rows[name], rows["status"], rows["diverged"], strict=True))
        if rank(status, diverged) == 0 and not missing(value)
    }
    return BEST[name](values, key=lambda row: values[row]) if len(values) > 1 else None


def sentence(rows: pd.DataFrame, same: Mapping[str, str], heads: Mapping[str, str]) -> str:
    """How many runs there are, and what all of them have in common: of the settings what was typed."""
    count = int(rows["n"].sum()) if "n" in rows else len(rows)
    parts = [f"{count:,} run{'s' if count != 1 else ''}"]
    parts += [f"{heads[name]} {word}" for name, word in same.items() if name != "status"]
    if "status" in same:
        parts.insert(1, same["status"])
    shared, typed = rows.attrs["shared"], rows.attrs["typed"]
    words = [f"{key}={shown(shared[key])}" for key in typed if key in shared]
    return " · ".join([*parts, *([f"all with {' '.join(words)}"] if words else [])])
