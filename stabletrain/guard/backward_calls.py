"""Tells attached guards what a loop differentiates.

`Tensor.backward` calls `torch.autograd.backward` through the module's attribute. As long as a listener is there, a
function stands in its place that tells the listeners of each call, and calls the one that stood there before unchanged.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import is_tensor_like


class Listener(Protocol):
    """Is told of backward calls."""

    def backward_call(self, roots: tuple[Any, ...], factors: tuple[Tensor | None, ...]) -> AbstractContextManager:
        """Returns the context in which a backward call runs.

        Args:
            roots: what is differentiated: tensors or `GradientEdge`s.
            factors: `grad_tensors` of each; None where none is given.
        """
        ...


_LISTENERS: "WeakSet[Listener]" = WeakSet()
_THREAD = threading.local()


def listen(listener: Listener) -> Callable[[], None]:
    """Tells a listener of all backward calls while it lives; returns a function that ends this."""
    _LISTENERS.add(listener)
    if not hasattr(torch.autograd.backward, "_stood_before"):
        torch.autograd.backward = told(torch.autograd.backward)  # ty: ignore[invalid-assignment]
    finalize(listener, restore).atexit = False

    def end() -> None:
        _LISTENERS.discard(listener)
        restore()

    return end


def restore() -> None:
    """Restores `torch.autograd.backward` after the last listener has gone, unless others have wrapped it since."""
    if not [*_LISTENERS]:
        torch.autograd.backward = getattr(torch.autograd.backward, "_stood_before", torch.autograd.backward)


def told(inner: Callable[..., None]) -> Callable[..., None]:
    """Returns `torch.autograd.backward`, which tells the listeners of each call."""

    @functools.wraps(inner)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        # A call within a backward pass, as by activation checkpointing, is a part of it; so is one by another wrapper.
        if torch._C._current_autograd_node() is not None or getattr(_THREAD, "told", False):
            return inner(tensors, grad_tensors, *args, **kwargs)
        if not (is_tensor_like(tensors) or isinstance(tensors, GradientEdge)):
            tensors = tuple(tensors)  # it may be an iterator
        if not (grad_tensors is None or is_tensor_like(grad_tensors)):
            grad_tensors = tuple(grad_tensors)
        roots = tensors if type(tensors) is tuple else (tensors,)
        factors = grad_tensors if type(grad_tensors) is tuple else (grad_tensors,) * len(roots)
        with contextlib.ExitStack() as stack:
            for listener in [*_LISTENERS]:
                stack.enter_context(listener.backward_call(roots, factors))
            _THREAD.told = True
            stack.callback(setattr, _THREAD, "told", False)
            return inner(tensors, grad_tensors, *args, **kwargs)

    backward._stood_before = inner  # ty: ignore[missing-attribute]
    return backward
