"""What runs show side by side, finished or not.

from stabletrain.compare import by_seed, frame

runs = frame("multirun/2026-11-21/16-45-39")        # a pandas.DataFrame, one row a run
by_seed(runs).sort_values("val_loss")               # one row for runs that differ in their seed only
runs.attrs["shared"]                                # the settings that all of them have in common
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stabletrain.compare.frames import by_seed, frame, frame_of
    from stabletrain.compare.reading.run import Run
    from stabletrain.compare.reading.runs import read_runs

__all__ = ["Run", "by_seed", "frame", "frame_of", "read_runs"]

ROOMS = {
    "by_seed": "frames",
    "frame": "frames",
    "frame_of": "frames",
    "Run": "reading.run",
    "read_runs": "reading.runs",
}
"""The file of each name: loaded when it is asked for, since not all who draw a picture want pandas."""


def __getattr__(name: str) -> Any:
    if name not in ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{ROOMS[name]}"), name)
