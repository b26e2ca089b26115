"""Imports large libraries without Python's garbage collector.

Importing PyTorch makes hundreds of thousands of objects that live as long as the process. The collector would visit
them again and again while they are made, which took a quarter of the time, and in every full collection afterwards.
"""

import atexit
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected(*, for_good: bool) -> Generator[None]:
    """A context for imports in which no garbage is collected.

    Args:
        for_good: whether the collector never visits what lives at the end of the context. Objects are still deleted
            when nothing refers to them, but not if they refer to each other.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
        if for_good:
            gc.freeze()
            atexit.register(unfreeze_for_nanobind)
    finally:
        if was:
            gc.enable()


def unfreeze_for_nanobind() -> None:
    """Gives back to the collector what it never visits, if Triton is made with nanobind; called as the process ends.

    Nanobind, with which PyTorch 2.15's Triton is made, writes twenty lines about leaks to standard error if its objects
    still live at the end. Collecting them takes a second or two, so that it is not done for other versions.
    """
    ir = getattr(sys.modules.get("triton._C.libtriton"), "ir", None)
    if ir is not None and "nanobind" in {type(each).__module__ for each in vars(ir).values()}:
        gc.unfreeze()
