"""Hooks by which an attached guard watches a loop."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, ClassVar
from weakref import WeakMethod

NOTHING = getattr, (contextlib.nullcontext(), "__exit__")
"""What a hook is pickled as: a function that takes anything and does nothing, so that a saved model needs no more than
PyTorch to be loaded."""


class WeakHook:
    """A hook of a module that does not keep its target alive, and does nothing in a copy of the module.

    Attributes:
        paused: whether all hooks do nothing; see `not_watched`.
    """

    paused: ClassVar[bool] = False

    def __init__(self, target: Callable[..., Any] | None = None) -> None:
        self._target = None if target is None else WeakMethod(target)

    def __call__(self, *args: Any) -> None:
        """Calls the target, if it is still there."""
        target = None if self._target is None or WeakHook.paused else self._target()
        if target is not None:
            target(*args)

    def __reduce__(self) -> tuple:
        return NOTHING  # for `copy.deepcopy` and `torch.save`


@contextlib.contextmanager
def not_watched() -> Generator[None]:
    """A context in which no guard watches: what runs here belongs to a rerun, or to the optimizer's own step."""
    before, WeakHook.paused = WeakHook.paused, True
    try:
        yield
    finally:
        WeakHook.paused = before
