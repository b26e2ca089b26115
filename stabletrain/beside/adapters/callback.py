"""What the callbacks of all libraries share: a guard is attached when a training begins, and detached at its end.

A step that is run again leaves the user's objects as they were: counters, lists, metrics. The guard itself puts
weights, buffers, gradients and random generators back (`guard/rerun.py`).
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.guard.attached_guard import AttachedGuard
from stabletrain.guard.guard import Guard

IN_A_LOOP = "use guard.step in a loop of your own"


class GuardHolder:
    """Attaches a guard when a training begins, and detaches it at the end.

    Attributes:
        guard: the guard of the training that runs, or ran last; None before the first. See `Guard` for `guard.skipped`,
            `guard.incidents` and so on.

    Args:
        options: as for `Guard.attach`.
    """

    def __init__(self, **options: Any) -> None:
        self.guard: AttachedGuard | None = None
        self._options = options
        self._undo: list[Callable[[], Any]] = []

    def _attach(self, model: nn.Module | None, optimizer: Optimizer, scaler: Any) -> AttachedGuard:
        """Attaches a new guard, which `_release` detaches."""
        assert model is not None
        self.guard = guard = Guard.attach(model, optimizer, scaler=scaler, **self._options)
        self._undo.append(guard.detach)
        return guard

    def _release(self) -> None:
        """Undoes everything in `_undo`, the newest first."""
        while self._undo:
            self._undo.pop()()


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
