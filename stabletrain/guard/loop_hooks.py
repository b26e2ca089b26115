"""Hooks by which an attached guard watches a loop."""

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakMethod


class WeakHook:
    """A hook of a module that does not keep its target alive, and does nothing in a copy of the module.

    Attributes:
        paused: whether all hooks do nothing, because a guard runs a step again.
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
        return WeakHook, ()  # for `copy.deepcopy` and `torch.save`
