"""Whether training passes may compute activations again in the backward pass (`stability/activation_checkpointing.py`).

A backward pass of a backward pass needs them all, as for the Hessian of the monitors.
"""

from collections.abc import Generator
from contextlib import contextmanager

_kept = False


@contextmanager
def without_recomputation() -> Generator[None, None, None]:
    """A context in which every activation is kept."""
    global _kept
    before, _kept = _kept, True
    try:
        yield
    finally:
        _kept = before


def may_recompute() -> bool:
    """Returns whether activations may be computed again."""
    return not _kept
