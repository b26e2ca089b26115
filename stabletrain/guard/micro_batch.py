"""A closure with its batch: one micro-batch of a step, which can be run again."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stabletrain.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a step.

    Attributes:
        closure: runs forward and returns the loss, a scalar, or a tuple that begins with it. It takes nothing, or the
            batch.
        batch: argument of the closure; a tuple or list is passed as several arguments, if the closure takes as many. A
            closure that takes nothing is called without it. None if unknown.
    """

    closure: Callable[..., Any]
    batch: Any = None

    @property
    def takes_batch(self) -> bool:
        """Whether the closure is called with the batch, so that it can be run with another one."""
        return self.batch is not None and not takes_nothing(self.closure)

    def __call__(self) -> Any:
        """Runs the closure; returns its result."""
        if not self.takes_batch:
            return self.closure()
        if isinstance(self.batch, tuple | list) and takes(self.closure, len(self.batch)):
            return self.closure(*self.batch)
        return self.closure(self.batch)


def takes_nothing(closure: Callable[..., Any]) -> bool:
    """Returns whether a function takes no positional argument, so that it is called without the batch."""
    if (known := argument_count(closure)) is not None:
        return known == 0
    try:
        parameters = inspect.signature(closure).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return all(each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters)


def argument_count(closure: Callable[..., Any]) -> int | None:
    """Returns the number of arguments in the usual case, without the cost of a signature; None in any other."""
    code = getattr(closure, "__code__", None)  # a method has that of its function
    if code is None or hasattr(closure, "__wrapped__"):
        return None
    if getattr(closure, "__defaults__", None) or code.co_kwonlyargcount or code.co_flags & inspect.CO_VARARGS:
        return None
    return code.co_argcount - inspect.ismethod(closure)


def takes(closure: Callable[..., Any], count: int) -> bool:
    """Returns whether a function is to be called with `count` positional arguments, not with the batch as a whole."""
    if (known := argument_count(closure)) is not None:
        return known == count
    try:
        parameters = inspect.signature(closure).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return True
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = sum(each.default is each.empty for each in positional)
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return needed <= count
    # A single argument without a default is the whole batch, even if more could be given.
    return needed == count or (needed != 1 and needed < count <= len(positional))


def in_new_containers(batch: Any) -> Any:
    """Returns the same tensors in new tuples, lists and mappings: the loop may refill its own."""
    return map_tensors(lambda tensor: tensor, batch)


def loss_of(value: Any) -> Tensor:
    """Checks the value that a closure returned: the loss, or a tuple that begins with it.

    Returns:
        the loss, 0-d.

    Raises:
        ConfigError: it is no scalar tensor, or depends on no parameter.
    """
    value = value[0] if isinstance(value, tuple) and len(value) > 1 else value
    if not isinstance(value, Tensor):
        hint = "; return its .loss" if isinstance(getattr(value, "loss", None), Tensor) else ""
        raise ConfigError(
            f"the closure returned a {type(value).__name__}, not a loss: return a scalar tensor, before "
            f".backward() and .item(){hint}"
        )
    if value.is_complex():
        raise ConfigError("the closure returned a complex loss: return a real scalar, such as .abs().mean()")
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
        if type(value) is dict:
            return mapped
        try:
            return type(value)(mapped)
        except TypeError:
            return mapped
    return value


def versions(batch: Any) -> list[tuple[Tensor, int]]:
    """Returns a batch's tensors with their versions, to notice later whether they were changed in place."""
    return [(tensor, tensor._version) for _, tensor in named_tensors(batch) if not tensor.is_inference()]


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
