"""Imports large libraries without Python's garbage collector.

Importing PyTorch makes hundreds of thousands of objects that live as long as the process. The collector would visit
them again and again while they are made, which took a quarter of the time, and in every full collection afterwards.
"""

import gc
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
    finally:
        if was:
            gc.enable()
