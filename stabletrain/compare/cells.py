"""The columns that a comparison's table may have: their heads, their values in words, and which of them matter most."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from stabletrain.compare.reading.settings import shown


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


def general(value: float) -> str:
    """Three digits that count."""
    return f"{value:.3g}"


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.1f} %" if value >= 1e-3 or value == 0 else f"{100 * value:.2g} %"


def thousands(value: float | int) -> str:
    """950, 14.6k, 1.2M."""
    return f"{value / 1e6:.3g}M" if value >= 1e6 else f"{value / 1e3:.3g}k" if value >= 1e3 else f"{value:.3g}"


def clock(value: float | int) -> str:
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
    Column("peak_memory_gb", "peak GB", general),
    Column("card", "card", plain, right=False),
    Column("precision", "precision", plain, right=False),
    Column("steps", "steps", plain),
    Column("parameters", "parameters", thousands),
    Column("seconds", "time", clock),
    Column("sweep", "sweep", plain, right=False),
)
"""Those that a table may have beside the run's name and its settings, the most important first."""

MATTERS = ("card", "precision", "status", "val_loss", "cause", "range", "best_val_loss", "val_accuracy", "diverged",
          "sensitivity", "spike_score", "units_per_s", "skips", "rollbacks", "incidents", "mfu", "peak_memory_gb",
          "seconds", "steps", "sweep", "parameters")  # fmt: skip
"""What is kept where not everything fits, the most important first: what differs in hardware, then how it ended."""

CAN_BE_SHARED = ("status", "cause", "incidents", "skips", "rollbacks", "spike_score", "card", "precision", "steps",
                 "parameters", "sweep", "diverged")  # fmt: skip
"""Columns that are said once, above the table, where they are the same in all rows."""


def words_of(rows: pd.DataFrame) -> dict[str, list[str]]:
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
