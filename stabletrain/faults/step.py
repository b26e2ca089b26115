"""Faults within a training step, by tick: how often a step has been executed before, those rolled back included.

A tick never comes twice in a run, so such a fault does not come back after a rollback, and a run that is resumed meets
it again where the first process met it.

What happens at a tick is set up when the step begins, for this one step: between two faults the model has no hook, and
runs the very code it runs with `faults=none`. A step begins by forgetting the gradients of the one before; so it is the
optimizer's `zero_grad` that is wrapped.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.faults.planned import OnRank
from stabletrain.records import TrainState


@runtime_checkable
class Removable(Protocol):
    """What `register_*_hook` returns."""

    def remove(self) -> None:
        """Takes it away; a second time does nothing."""
        ...


@dataclass(frozen=True)
class OfStep(OnRank):
    """A fault within a step; `at` counts ticks."""

    def state(self, state: TrainState, precision: Any) -> None:
        """Watches the beginning of every step.

        Raises:
            ConfigError: the state does not have what the fault is to hit.
        """
        self.check(state)
        waiting: list[Removable] = []

        def begin() -> None:
            while waiting:  # what the step before did not come to: it was withheld, or had nothing to run on
                waiting.pop().remove()
            if self.hits(state.tick):
                waiting.extend(self.strike(state, precision))

        before_each_step(state.optimizer, begin)

    def check(self, state: TrainState) -> None:
        """Refuses, before the first step, a state that the fault cannot hit."""
        del state

    def strike(self, state: TrainState, precision: Any) -> list[Removable]:
        """Harms the state now, or prepares the step for it; what it returns is removed when the next step begins."""
        raise NotImplementedError


def before_each_step(optimizer: Optimizer, act: Any) -> None:
    """Has `act()` called at the beginning of every step, when the gradients of the one before are gone."""
    forget = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        forget(set_to_none=set_to_none)
        act()

    optimizer.zero_grad = zero_grad


def chosen_parameter(model: nn.Module, name: str | None) -> tuple[str, nn.Parameter]:
    """The trained parameter of that name; without one the middle one, of those that are matrices or kernels if any are.

    Raises:
        ConfigError: the model has no such parameter, or does not train it.
    """
    trained = {each: parameter for each, parameter in model.named_parameters() if parameter.requires_grad}
    if name is None:
        known = [each for each, parameter in trained.items() if parameter.ndim > 1] or list(trained)
        name = known[len(known) // 2]
    if name not in trained:
        raise ConfigError(
            f"faults.parameter={name} is no parameter that the model trains: its parameters are {', '.join(trained)}"
        )
    return name, trained[name]


@torch.no_grad()
def overwrite_(tensor: torch.Tensor, where: tuple[int, ...], value: float) -> None:
    """Writes one element, in place, where no graph sees it."""
    tensor[where] = value
