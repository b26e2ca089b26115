"""A closure with its batch: one micro-batch of a step, which can be run again."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from stabletrain.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """One micro-batch of a step.

    Attributes:
        closure: runs forward and returns the loss, a scalar. It takes nothing, or the batch.
        batch: what the closure is called with: the elements of a tuple or list one by one, if the closure takes as
            many, else the batch itself; None for a closure that takes nothing.
    """

    closure: Callable[..., Any]
    batch: Any = None

    @property
    def takes_batch(self) -> bool:
        """Whether the closure is called with the batch, so that it can be run with another one."""
        return self.batch is not None

    def __call__(self) -> Any:
        """Runs the closure; returns what it returns."""
        return self.run_with(self.batch)

    def run_with(self, batch: Any) -> Any:
        """Runs the closure with another batch."""
        if batch is None:
            return self.closure()
        if isinstance(batch, tuple | list) and takes(self.closure, len(batch)):
            return self.closure(*batch)
        return self.closure(batch)


def takes(closure: Callable[..., Any], count: int) -> bool:
    """Returns whether a function can be called with `count` positional arguments."""
    code = getattr(closure, "__code__", None)
    if code is None or getattr(closure, "__defaults__", None) or inspect.ismethod(closure):
        return binds(closure, count)
    if code.co_flags & inspect.CO_VARARGS:
        return code.co_argcount <= count
    return code.co_argcount == count and not code.co_kwonlyargcount


@cache
def binds(closure: Callable[..., Any], count: int) -> bool:
    """Returns the same from the signature: slower, but for any callable."""
    try:
        inspect.signature(closure).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a callable without a signature
        return True
    return True


def loss_of(value: Any) -> Tensor:
    """Checks what a closure returned.

    Returns:
        the loss, 0-d.

    Raises:
        ConfigError: it is no scalar tensor, or depends on no parameter.
    """
    if not isinstance(value, Tensor):
        hint = "; return its .loss" if isinstance(getattr(value, "loss", None), Tensor) else ""
        raise ConfigError(
            f"the closure returned a {type(value).__name__}, not a loss: return a scalar tensor, before "
            f".backward() and .item(){hint}"
        )
    if value.numel() != 1:
        raise ConfigError(
            f"the closure returned a tensor of shape {list(value.shape)}: return a scalar, such as .mean()"
        )
    if not value.requires_grad:
        raise ConfigError(
            "the closure returned a loss without a gradient: it depends on no parameter, or was detached, or ran under "
            "torch.no_grad()"
        )
    return value.reshape(())


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns the same batch with `function` applied to each tensor in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(function, each) for each in value])
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, each) for each in value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(function, each) for key, each in value.items()}
        try:
            return type(value)(mapped)
        except TypeError:
            return mapped
    return value


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Returns the tensors of a batch, each with its keys and positions joined by dots, such as `1` or `labels`."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        inside = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, tuple | list):
        inside = [(str(key), each) for key, each in enumerate(value)]
    else:
        return []
    return [found for key, each in inside for found in named_tensors(each, f"{name}.{key}" if name else key)]
