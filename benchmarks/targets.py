"""What the benchmarks of recovery, start and growth print: a quantity's median, quartiles, and whether it is met.

    python benchmarks/targets.py results/*.json

prints one table of all quantities in such files that have a target.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("measured", "quantity", "median", "quartiles", "unit", "target", "met")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and lower and upper quartile; of a single value, that."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def quantity(
    where: str, what: str, values: Sequence[float], unit: str, at_most: float | None = None, **more: Any
) -> dict[str, Any]:
    """One result.

    Args:
        where: what it was measured on, such as a model and its precision.
        what: is measured.
        values: one of each round.
        unit: of the values.
        at_most: the target, which the median is held to; None without one.
        more: goes into the file beside it.
    """
    middle, low, high = quartiles(values)
    met = None if at_most is None else middle <= at_most
    about = {"workload": where, "what": what, "unit": unit, "median": middle, "quartiles": [low, high]}
    return {**about, "target": at_most, "met": met, "values": list(values), **more}


def head(columns: Sequence[str] = COLUMNS) -> str:
    """The first two lines of a table."""
    return "| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"


def line(found: dict[str, Any]) -> str:
    """A result's line of the table."""
    low, high = found["quartiles"]
    target, met = "", {True: "yes", False: "NO", None: ""}[found["met"]]
    if found["target"] is not None:
        target = f"<= {found['target']:g}"
    cells = (found["workload"], found["what"], short(found["median"]), f"{short(low)} - {short(high)}", found["unit"])
    return "| " + " | ".join((*cells, target, met)) + " |"


def show(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints the line of each result as it comes; returns them all."""
    shown = []
    for found in results:
        print(line(found), flush=True)
        shown.append(found)
    return shown


def short(value: float) -> str:
    """Three digits of a number, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> int:
    """Prints the table; returns 1 where a target is missed."""
    print(head(("file", *COLUMNS)))
    missed = 0
    for path in map(Path, sys.argv[1:]):
        for found in json.loads(path.read_text())["results"]:
            if found.get("target") is not None:
                print(f"| {path.stem} {line(found)}")
                missed += not found["met"]
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
