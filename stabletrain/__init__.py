"""stabletrain: a trainer in which no unsafe update ever reaches the weights.

| name | |
|---|---|
| `Guard` | the guard and the diagnosis for a training loop of your own |
| `Batch` | what a data set of your own returns |
| `LossTerms` | what an objective of your own may return |
| `train` | trains one run, as the command `stabletrain train` |
| `load` | the trained model of a run or a checkpoint |
| `compare` | runs as a data frame |

The errors are in `stabletrain.errors`. Everything else may change between versions.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stabletrain.api import load, train
    from stabletrain.beside.comparison.api import compare
    from stabletrain.guard.guard import Guard
    from stabletrain.records import Batch, LossTerms

__version__ = "0.1.0"

__all__ = ["Batch", "Guard", "LossTerms", "compare", "load", "train"]

PLACES = {
    "Batch": "stabletrain.records",
    "Guard": "stabletrain.guard.guard",
    "LossTerms": "stabletrain.records",
    "compare": "stabletrain.beside.comparison.api",
    "load": "stabletrain.api",
    "train": "stabletrain.api",
    "load_ipython_extension": "stabletrain.beside.script.start",
    "unload_ipython_extension": "stabletrain.beside.script.start",
}
"""The module of each name. It is imported on first use: `python train.py --help` and refusals must not load torch."""


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(PLACES[name]), name)
    except ModuleNotFoundError as error:
        if find_spec("stabletrain.beside") is not None:
            raise
        from stabletrain.extension import needs_beside

        raise ModuleNotFoundError(str(needs_beside(f"stabletrain.{name}")), name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
