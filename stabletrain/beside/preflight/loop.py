"""What the checks are given of a training loop, and how a fresh one is made.

A check never touches the loop of the user: it calls `make()`, which builds everything anew as the script does when it
starts, and works on what that returns.
"""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError, did_you_mean

Batch = tuple[Any, ...]


@dataclass
class Loop:
    """The parts of a freshly made loop. All but the first four may be missing; then some checks are not made.

    Attributes:
        model: whose weights are trained.
        optimizers: one, or several that step one after the other.
        loss: `loss(batch)` returns the mean loss over the batch's targets, without backward, in training mode and under
            the loop's autocast.
        batch: `batch(step, rank=0)` returns what `loss` takes: a tuple such as inputs and targets. It depends only on
            its arguments.
        step: `step(batch)` takes one training step as the loop does it.
        next_batch: `next_batch()` returns the batch at the loop's position in the data, which moves on.
        save: `save()` returns everything that a resume needs, as it would be written to a file.
        load: `load(state)` is what a resume does with it, in a fresh loop.
        schedulers: of the learning rate.
        scaler: the `GradScaler`, or what has its names; None without one.
        others: what else training changes and a resume must restore, by name, such as an average of the weights.
        precision: of `loss`: `fp32`, `bf16` or `fp16` under autocast, or `fp16_params` if the weights are in fp16.
        compiled: whether `loss` runs a compiled model.
        epoch: number of batches after which the data begin anew; 0 if unknown.
        ranks: number of ranks that the data are divided among.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loss: Callable[[Any], Tensor]
    batch: Callable[..., Any]
    step: Callable[[Any], Any] | None = None
    next_batch: Callable[[], Any] | None = None
    save: Callable[[], Any] | None = None
    load: Callable[[Any], Any] | None = None
    schedulers: Sequence[Any] = ()
    scaler: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    compiled: bool = False
    epoch: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        self.made: Any = self  # what `make()` returned

    def current(self) -> "Loop":
        """Returns the loop with the parts that it has now: a load may have replaced the optimizer or the scheduler."""
        return loop_of(self.made)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name; a tied one has its first name only."""
        return dict(self.model.named_parameters())

    def name_of(self, parameter: Tensor) -> str:
        """Returns a parameter's name; for one that is not the model's its place in the optimizers."""
        for name, each in self.model.named_parameters():
            if each is parameter:
                return name
        for index, optimizer in enumerate(self.optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for place, each in enumerate(group["params"]):
                    if each is parameter:
                        return f"optimizers.{index}.param_groups[{number}].params[{place}]"
        return "?"


REQUIRED = ("model", "optimizers", "loss", "batch")
OPTIONAL = tuple(name for name in Loop.__dataclass_fields__ if name not in REQUIRED)


def loop_of(made: Any) -> Loop:
    """Returns the loop of what a user's `make()` returned: an object with the attributes of `Loop`, or a mapping.

    Raises:
        ConfigError: a part is missing or of the wrong kind, or a mapping has a name that no part has.
    """
    if isinstance(made, Loop):
        return made
    if isinstance(made, Mapping):
        for name in made:
            if name not in Loop.__dataclass_fields__:
                hint = did_you_mean(str(name), Loop.__dataclass_fields__)
                raise ConfigError(f"make() returned {name!r}, which no check knows{hint}")
        found = dict(made)
    else:
        found = {name: getattr(made, name) for name in Loop.__dataclass_fields__ if hasattr(made, name)}
    for name in REQUIRED:
        if name not in found:
            raise ConfigError(f"make() returned no {name!r}; fix: return an object with {', '.join(REQUIRED)}")
    if isinstance(found["optimizers"], Optimizer):
        found["optimizers"] = [found["optimizers"]]
    if not isinstance(found["model"], nn.Module):
        raise ConfigError(f"make() returned a model that is no torch.nn.Module: {type(found['model']).__name__}")
    for each in found["optimizers"]:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"make() returned an optimizer that is no torch.optim.Optimizer: {type(each).__name__}")
    for name in ("loss", "batch", "step", "next_batch", "save", "load"):
        if found.get(name) is not None and not callable(found[name]):
            raise ConfigError(f"make() returned {name}={found[name]!r}, which is no function")
    loop = Loop(**found)
    loop.made = made
    return loop


class Maker:
    """Makes fresh loops, all alike.

    Args:
        make: the user's function.

    Raises:
        ConfigError: it returns the same model again.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._models: WeakSet[nn.Module] = WeakSet()

    def __call__(self) -> Loop:
        """Returns a fresh loop. The random numbers that it draws from now on are those of each other fresh loop."""
        seed(0)
        loop = loop_of(self._make())
        if loop.model in self._models:
            raise ConfigError("make() returned the same model twice; fix: build model and optimizer inside make()")
        self._models.add(loop.model)
        seed(1)
        return loop


def seed(number: int) -> None:
    """Seeds Python's, NumPy's and PyTorch's random numbers."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@contextmanager
def nothing_changed() -> Generator[None, None, None]:
    """Restores random states, gradient mode and PyTorch's default type at the end."""
    numbers, of_numpy = random.getstate(), np.random.get_state()
    dtype, enabled = torch.get_default_dtype(), torch.is_grad_enabled()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(numbers)
            np.random.set_state(of_numpy)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(enabled)
