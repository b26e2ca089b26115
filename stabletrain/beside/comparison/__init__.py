"""Compares runs, finished or not, side by side.

from stabletrain.beside.comparison import by_seed, frame

runs = frame("multirun/2026-11-21/16-45-39")        # a pandas.DataFrame, one row per run
by_seed(runs).sort_values("val_loss")               # one row for runs that differ only in their seed
runs.attrs["shared"]                                # the settings that all runs have in common
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stabletrain.beside.comparison.frames import by_seed, frame, frame_of
    from stabletrain.beside.comparison.reading.run import Run
    from stabletrain.beside.comparison.reading.runs import read_runs

__all__ = ["Run", "by_seed", "frame", "frame_of", "read_runs"]

ROOMS = {
    "by_seed": "frames",
    "frame": "frames",
    "frame_of": "frames",
    "Run": "reading.run",
    "read_runs": "reading.runs",
}
"""The submodule of each name. It is imported on first use, because drawing a picture needs no pandas."""


def __getattr__(name: str) -> Any:
    if name not in ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{ROOMS[name]}"), name)
