"""Tells attached guards what a loop differentiates.

`Tensor.backward` calls `torch.autograd.backward` through the module's attribute. As long as a listener is there, a
function stands in its place that tells the listeners of each call, and calls the one that stood there before unchanged.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, finalize

import torch

from stabletrain.guard.loop_hooks import WeakHook

_LISTENERS: WeakSet[Any] = WeakSet()
_TELLING: WeakSet[Callable[..., Any]] = WeakSet()
_THREAD = threading.local()


def listen(listener: Any) -> Callable[[], None]:
    """Tells a listener of all backward calls while it lives; returns a function that ends this.

    Each call runs in the context `listener.backward_call(roots, factors)`. `roots` is what is differentiated: tensors,
    but perhaps others; `factors` are the `grad_tensors` of each, None where none is given.
    """
    _LISTENERS.add(listener)
    if torch.autograd.backward not in _TELLING:
        torch.autograd.backward = told(torch.autograd.backward)  # ty: ignore[invalid-assignment]
    finalize(listener, restore).atexit = False

    def end() -> None:
        _LISTENERS.discard(listener)
        restore()

    return end


def within_backward() -> bool:
    """Whether this is called by a backward pass."""
    return torch._C._current_autograd_node() is not None


def restore() -> None:
    """Restores `torch.autograd.backward` after the last listener has gone, unless others have wrapped it since."""
    if not [*_LISTENERS] and torch.autograd.backward in _TELLING:
        torch.autograd.backward = torch.autograd.backward.__wrapped__  # ty: ignore[missing-attribute]


def told(inner: Callable[..., None]) -> Callable[..., None]:
    """Returns `torch.autograd.backward`, which tells the listeners of each call."""

    @functools.wraps(inner)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        # A call within a backward pass, as by activation checkpointing, is a part of it; on a card it runs in another
        # thread. So is a call by another function that stands above this one.
        within = within_backward() or getattr(_THREAD, "told", False)
        if within or WeakHook.paused:
            return inner(tensors, grad_tensors, *args, **kwargs)
        roots = tensors if isinstance(tensors, list | tuple) else [tensors]
        factors = grad_tensors if isinstance(grad_tensors, list | tuple) else [grad_tensors] * len(roots)
        with contextlib.ExitStack() as stack:
            for listener in [*_LISTENERS]:
                stack.enter_context(listener.backward_call(roots, factors))
            _THREAD.told = True
            stack.callback(setattr, _THREAD, "told", False)
            return inner(tensors, grad_tensors, *args, **kwargs)

    _TELLING.add(backward)
    return backward
