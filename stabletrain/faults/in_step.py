"""Faults within a training step: a bad activation, a bad gradient, a burst of the learning rate.

Faults within a training step, by tick: how often a step has been executed before, those rolled back included.

A tick never comes twice in a run, so such a fault does not come back after a rollback, and a run that is resumed meets
it again where the first process met it.

What happens at a tick is set up when the step begins, for this one step: between two faults the model has no hook, and
runs the very code it runs with `faults=none`. A step begins by forgetting the gradients of the one before; so it is the
optimizer's `zero_grad` that is wrapped.

A bad activation: one element of one module's output is NaN, Inf, or any number, once, in the forward pass.

A bad gradient: one element of one parameter's gradient is NaN, Inf, or any number, once, in the backward pass.

A burst of the learning rate: for some ticks every update is taken with a multiple of what schedule and guard chose.

The optimizer's groups hold the burst only while the update is taken; what is logged and saved is the rate as planned.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.faults.planned import OnRank, check_at_least, check_number, own, place, say
from stabletrain.records import TrainState


@runtime_checkable
class Removable(Protocol):
    """What `register_*_hook` returns."""

    def remove(self) -> None:
        """Takes it away; a second time does nothing."""
        ...


@dataclass(frozen=True)
class StepFault(OnRank):
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
            if self.hits(state.executed_steps):
                waiting.extend(self.inject(state, precision))

        before_each_step(state.optimizer, begin)

    def check(self, state: TrainState) -> None:
        """Refuses, before the first step, a state that the fault cannot hit."""
        del state

    def inject(self, state: TrainState, precision: Any) -> list[Removable]:
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


@dataclass(frozen=True)
class Activation(StepFault):
    """One bad element in what a module returns, in the first micro-batch of the step.

    Attributes:
        value: what is written; it takes the output's own dtype, so that fp16 makes Inf of 1e6.
        module: dotted name; None for the middle one of those that have parameters of their own.
        seed: which element.
    """

    value: float = float("nan")
    module: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("value", self.value)

    def check(self, state: TrainState) -> None:
        chosen_module(state.model, self.module)

    def inject(self, state: TrainState, precision: Any) -> list[Removable]:
        name, module = chosen_module(state.model, self.module)
        plain = Plain(state.model)
        hook = module.register_forward_hook(partial(self._spoil, name, state.executed_steps, []))
        return [hook, plain]

    def _spoil(self, name: str, tick: int, done: list[bool], module: nn.Module, inputs: Any, output: Any) -> Any:
        """The output with one element overwritten, the first time in training; the very output otherwise."""
        if done or not torch.is_grad_enabled():
            return output
        done.append(True)
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"faults.module={name} returns a {type(output).__name__}, no tensor: name a module inside of it"
            )
        where = place(output, self.seed, tick)
        say(f"activation of {name} {list(where)} = {self.value} at tick {tick}")
        output = output.clone()
        output[where] = self.value
        return output


class Plain:
    """A model compiled in place that runs as plain Python until `remove`: compiled code does not hear new hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._compiled = model, model._compiled_call_impl
        model._compiled_call_impl = None

    def remove(self) -> None:
        """Compiled code runs again."""
        self._model._compiled_call_impl = self._compiled


def chosen_module(model: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """The module of that name; without one the middle one of those with parameters of their own.

    Raises:
        ConfigError: the model has no such module.
    """
    modules = dict(model.named_modules())
    if name is None:
        known = [each for each, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
        name = known[len(known) // 2]
    if name not in modules:
        raise ConfigError(f"faults.module={name} names no module: the model's are {', '.join(filter(None, modules))}")
    return name, modules[name]


@dataclass(frozen=True)
class Gradient(StepFault):
    """One bad element in one gradient, written when the first micro-batch of the step has made it.

    Attributes:
        value: what is written. A finite one is what arrives at the optimizer: fp16's loss scale is taken into account.
        parameter: dotted name; None for the middle one of the matrices and kernels.
        seed: which element.
    """

    value: float = float("nan")
    parameter: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("value", self.value)

    def check(self, state: TrainState) -> None:
        chosen_parameter(state.model, self.parameter)

    def inject(self, state: TrainState, precision: Any) -> list[Removable]:
        name, parameter = chosen_parameter(state.model, self.parameter)
        scale = float(precision.loss_scale()) if math.isfinite(self.value) else 1.0
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._spoil, name, state.executed_steps, scale, []))
        ]

    def _spoil(self, name: str, tick: int, scale: float, done: list[bool], parameter: Tensor) -> None:
        """Overwrites one element, the first time."""
        if done or parameter.grad is None:
            return
        done.append(True)
        gradient = own(parameter.grad)
        if not gradient.numel():  # another rank has all of it
            return
        where = place(gradient, self.seed, tick)
        say(f"gradient of {name} {list(where)} = {self.value} at tick {tick}")
        overwrite_(gradient, where, self.value * scale)


@dataclass(frozen=True)
class LearningRate(StepFault):
    """A multiple of the learning rate for some ticks.

    Attributes:
        factor: above 0.
        length: ticks from each of `at` on.
    """

    factor: float = 100.0
    length: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor)
        check_at_least("length", self.length, 1)
        if not self.factor > 0:
            raise ConfigError(f"faults.factor={self.factor} is not above 0: 100 is a burst")

    def hits(self, number: int) -> bool:
        return self.on_this_rank() and any(start <= number < start + self.length for start in self.at)

    def inject(self, state: TrainState, precision: Any) -> list[Removable]:
        tick, planned = state.executed_steps, []

        def raise_rates(optimizer: Optimizer, *_: Any) -> None:
            say(f"learning rate x {self.factor:g} at tick {tick}")
            for group in optimizer.param_groups:
                planned.append(group["lr"])
                group["lr"] = group["lr"] * self.factor

        def put_back(optimizer: Optimizer, *_: Any) -> None:
            for group, rate in zip(optimizer.param_groups, planned, strict=True):
                group["lr"] = rate
            planned.clear()

        return [
            state.optimizer.register_step_pre_hook(raise_rates),
            state.optimizer.register_step_post_hook(put_back),
        ]
