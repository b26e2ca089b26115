"""A measured quantity with its unit over rounds: a table line, and a result in the JSON file."""

from collections.abc import Iterable, Sequence
from typing import Any

from measuring import quartiles, row

COLUMNS = ("measured", "quantity", "median", "quartiles", "unit")


def quantity(
    where: str, what: str, values: Sequence[float], unit: str, target: str = "", **more: Any
) -> dict[str, Any]:
    """Returns one result.

    Args:
        where: what it was measured on, such as a model and its precision.
        what: what was measured.
        values: one per round.
        unit: of the values.
        target: name of the target for the median; empty for none.
        more: further fields for the JSON file.
    """
    middle, low, high = quartiles(values)
    about = {"workload": where, "what": what, "unit": unit, "median": middle, "quartiles": [low, high]}
    return {**about, "target": target, "values": list(values), **more}


def show(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints each result's line as it arrives; returns them all."""
    shown = []
    for found in results:
        low, high = map(short, found["quartiles"])
        print(
            row(found["workload"], found["what"], short(found["median"]), f"{low} - {high}", found["unit"]), flush=True
        )
        shown.append(found)
    return shown


def reached(results: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Returns, per target, the largest median of its results."""
    values: dict[str, float] = {}
    for found in results:
        if name := found.get("target"):
            values[name] = max(found["median"], values.get(name, found["median"]))
    return values


def short(value: float) -> str:
    """Formats a number with three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
