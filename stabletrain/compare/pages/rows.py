"""The rows and columns of the page's table: what differs is a column, and what is the same everywhere is not."""

import math
import numbers
from collections import Counter
from collections.abc import Sequence
from typing import Any

from stabletrain.compare.pages.drawn import rounded
from stabletrain.compare.pages.headline import FEW, Row, number
from stabletrain.compare.reading.run import Run
from stabletrain.compare.reading.settings import Value, scalar, value_of

COLUMNS: list[tuple[str, str, dict[str, Any]]] = [
    ("status", "status", {"status": True}),
    ("val_loss", "val loss", {"about": "at the end, nats"}),
    ("best_val_loss", "best val loss", {}),
    ("best_step", "at step", {"about": "step of the best validation loss"}),
    ("val_accuracy", "val accuracy", {"high": True}),
    ("diverged", "diverged", {"high": True}),
    ("sensitivity", "sensitivity", {"about": "to the learning rate, of the runs that differ from it in that only"}),
    ("spike_score", "spike score", {"about": "share of steps whose loss was a spike", "high": True}),
    ("skips", "skips", {"about": "steps whose update was withheld", "high": True}),
    ("rollbacks", "rollbacks", {"high": True}),
    ("incidents", "incidents", {"high": True}),
    ("cause", "first cause", {}),
    ("units_per_s", "units/s", {"about": "tokens, images or samples a second", "high": True}),
    ("unit", "unit", {}),
    ("mfu", "MFU", {"about": "model FLOP/s as a share of the card's peak", "high": True}),
    ("peak_memory_gb", "memory, GB", {"about": "at its peak", "high": True}),
    ("card", "card", {}),
    ("precision", "precision", {}),
    ("steps", "steps", {"high": True}),
    ("seconds", "seconds", {"high": True}),
    ("parameters", "parameters", {"high": True}),
    ("loss_at_init", "loss at init", {}),
    ("problem", "what is to know", {}),
    ("sweep", "sweep", {}),
]
"""Columns of the frame in the order in which they are read: name there, heading here, and what the table is told."""

ALWAYS = ("status", "val_loss", "incidents")
"""Columns that are shown even where every run has the same value."""


def rank(row: Row) -> tuple[int, float]:
    """Finished runs by their loss, then those that are going on, then those that failed or diverged, then the rest."""
    order = {"finished": 0, "running": 1, "preempted": 1, "halted": 2, "failed": 3}
    place = 2 if row.get("diverged") else order.get(str(row.get("status")), 4)
    loss = row.get("val_loss")
    return (place if place or loss is not None else 2, math.inf if loss is None else float(loss))


def unique(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """The names, with the folder's beside one that several runs have."""
    known = Counter(names)
    return [
        f"{name} ({run.name})" if known[name] > 1 and name != run.name else name
        for name, run in zip(names, runs, strict=True)
    ]


def folders(runs: Sequence[Run]) -> list[str]:
    """The runs by their folders, with the sweep's where there are several sweeps."""
    several = len({run.sweep for run in runs}) > 1
    return [f"{run.sweep}/{run.name}" if several else run.name for run in runs]


def columns_of(
    runs: Sequence[Run], table: Sequence[Row], keys: Sequence[str]
) -> tuple[list[dict[str, Any]], list[list[Any]], dict[str, Any]]:
    """The table's columns, its rows, and what is the same in every row and therefore no column."""
    columns: list[dict[str, Any]] = [{"title": "run", "kind": "text", "name": True}]
    cells: list[Sequence[Any]] = [folders(runs)]
    settings = [(key, alike([setting(value_of(run, key)) for run in runs])) for key in keys]
    same = {}
    if len(keys) <= FEW:
        columns += [{"title": key, "kind": kind(values), "setting": True} for key, values in settings]
        cells += [values for _, values in settings]
    for name, heading, more in COLUMNS:
        values = [row.get(name) for row in table]
        distinct = {*values}
        if distinct <= {None} or (distinct <= {None, 0} and name not in ALWAYS):
            continue
        if len(distinct) == 1 and len(runs) > 1 and name not in ALWAYS:
            same[heading] = values[0]
            continue
        columns.append({"title": heading, "kind": kind(values), **more})
        cells.append(values)
    if len(keys) > FEW:  # what came of the runs must not be far to the right
        columns += [{"title": key, "kind": kind(values), "setting": True} for key, values in settings]
        cells += [values for _, values in settings]
    return columns, [list(row) for row in zip(*cells, strict=True)], same


def setting(value: Value) -> Any:
    """A setting's value for the table: a number, or text."""
    value = scalar(value) if isinstance(value, str) else value
    return (
        value if number(value) else None if value is None else str(value).lower() if value in (True, False) else value
    )


def alike(values: Sequence[Any]) -> list[Any]:
    """The values, as text where not all of them are numbers."""
    if all(value is None or number(value) for value in values):
        return list(values)
    return [None if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values]


def kind(values: Sequence[Any]) -> str:
    """`number` or `text`."""
    return "number" if all(value is None or number(value) for value in values) else "text"


def plain(value: Any) -> Any:
    """A cell of the frame as JSON knows it; None for what is missing."""
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
