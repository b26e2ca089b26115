"""A step that is run again leaves the user's objects as they were: counters, lists, metrics.

The guard itself puts weights, buffers, gradients and random generators back (`guard/rerun.py`).
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor, nn

MODULE_ATTRIBUTES = vars(nn.Module()).keys()
"""Attributes of every module: its parameters, buffers, children and hooks."""


LARGEST_COPIED = 2**20
"""Elements of a tensor that is copied: the state of a metric is small, a data set that a module holds is not."""


@contextlib.contextmanager
def unchanged(*objects: Any) -> Generator[None]:
    """A context after which the attributes of objects are as before.

    Lists, dicts and sets are copied for the context, also those inside of others, and tensors of up to `LARGEST_COPIED`
    elements: changes in place are lost.
    """
    kept = [(each, dict(vars(each))) for each in objects]
    for each, before in kept:
        vars(each).update({name: copied(value) for name, value in before.items() if name not in MODULE_ATTRIBUTES})
    try:
        yield
    finally:
        for each, before in kept:
            live = vars(each)
            for name in [*live]:
                if name not in before:
                    del live[name]
            live.update(before)


def copied(value: Any) -> Any:
    """Returns a copy of what user code may change in place; else the value itself."""
    if type(value) is Tensor:
        return value.clone() if value.numel() <= LARGEST_COPIED and not value.requires_grad else value
    return copied_containers(value)


def copied_containers(value: Any) -> Any:
    """Copies lists, dicts and sets, also nested ones; their elements stay the same objects."""
    if type(value) is dict:
        return {key: copied_containers(each) for key, each in value.items()}
    if type(value) is list:
        return [copied_containers(each) for each in value]
    return set(value) if type(value) is set else value


def do_nothing(*arguments: Any, **keywords: Any) -> None:
    """Does nothing: takes the place of functions that log."""


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of one object; returns a function that undoes this."""
    own = vars(owner).get(name)
    vars(owner)[name] = function

    def undo() -> None:
        vars(owner).pop(name, None)
        if own is not None:
            vars(owner)[name] = own

    return undo
