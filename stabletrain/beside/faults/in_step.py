"""Faults in a training step: a bad activation, a bad gradient, a burst of the learning rate.

A fault happens at a tick. The tick is the number of steps executed so far, including those that were rolled back. So
the fault does not return after a rollback, and a resumed run has it at the same tick. Only a replay runs a tick again:
faults of the machine do not happen again, as in reality; faults of the run, such as of its learning rate, do.

Each fault is set up at the start of its step and removed at the start of the next. Between faults the model has no
hooks and runs exactly the code it runs with `faults=none`. A step begins with the optimizer's `zero_grad`, which is why
`zero_grad` is wrapped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.beside.faults.planned import BadNumber, Multiplied, OnRank, local_shard, random_index, say
from stabletrain.errors import ConfigError
from stabletrain.records import TrainState

Undo = Callable[[], None]
"""Removes what a fault has added to the model or the optimizer; may be called twice."""


@dataclass(frozen=True)
class StepFault(OnRank):
    """A fault in a step; `at` counts ticks.

    Attributes:
        returns: whether the fault happens again if a tick is run again in the same process.
    """

    returns: ClassVar[bool] = False

    def state(self, state: TrainState, precision: Any) -> None:
        """Sets up the fault at the start of each planned step.

        Raises:
            ConfigError: the model or optimizer lacks the target of the fault.
        """
        self.check(state)
        waiting: list[Undo] = []
        done: set[int] = set()

        def begin() -> None:
            while waiting:  # hooks of the previous step: it may have been skipped before they ran
                waiting.pop()()
            tick = state.executed_steps
            if self.happens_at(tick) and (self.returns or tick not in done):
                done.add(tick)
                waiting.extend(self.inject(state, precision) if self.on_this_rank() else self.on_another_rank(state))

        before_each_step(state.optimizer, begin)

    def check(self, state: TrainState) -> None:
        """Raises ConfigError, before the first step, if the state lacks the target of the fault."""

    def inject(self, state: TrainState, precision: Any) -> list[Undo]:
        """Applies the fault now, or adds hooks that do so in this step; returns what removes them before the next."""
        raise NotImplementedError

    def on_another_rank(self, state: TrainState) -> list[Undo]:
        """Adds the hooks of a rank without the fault, in a step in which another rank has it."""
        return []


class UpdateFault(StepFault):
    """A fault in the optimizer's step."""

    def on_another_rank(self, state: TrainState) -> list[Undo]:
        """Hooks the step without effect: an update with a hook is checked, and all ranks must check the same ones."""
        return [state.optimizer.register_step_post_hook(lambda *_: None).remove]


def before_each_step(optimizer: Optimizer, act: Any) -> None:
    """Calls `act()` at the start of every step, after the previous gradients are cleared."""
    forget = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        forget(set_to_none=set_to_none)
        act()

    optimizer.zero_grad = zero_grad


def chosen_parameter(model: nn.Module, name: str | None) -> tuple[str, nn.Parameter]:
    """Returns name and parameter; without a name, the middle one of the trained matrices and kernels.

    Raises:
        ConfigError: the model has no such parameter, or does not train it.
    """
    trained = {each: parameter for each, parameter in model.named_parameters() if parameter.requires_grad}
    if name is None:
        known = [each for each, parameter in trained.items() if parameter.ndim > 1] or list(trained)
        name = known[len(known) // 2]
    if name not in trained:
        raise ConfigError(
            f"faults.parameter={name} is not a parameter that the model trains: choose from {', '.join(trained)}"
        )
    return name, trained[name]


@torch.no_grad()
def overwrite_(tensor: torch.Tensor, where: tuple[int, ...], value: float) -> None:
    """Overwrites one element in place, outside the autograd graph."""
    tensor[where] = value


@dataclass(frozen=True)
class Activation(BadNumber, StepFault):
    """One bad element in the output of a module, in the first micro-batch of the step.

    Attributes:
        value: new value, cast to the output's dtype: 1e6 becomes Inf in fp16.
        module: dotted name; None for the middle one of the modules that have parameters of their own.
        seed: selects the element.
    """

    module: str | None = None
    seed: int = 0

    def check(self, state: TrainState) -> None:
        chosen_module(state.model, self.module)

    def inject(self, state: TrainState, precision: Any) -> list[Undo]:
        name, module = chosen_module(state.model, self.module)
        compiled_again = run_uncompiled(state.model)
        hook = module.register_forward_hook(partial(self._spoil, name, state.executed_steps, []))
        return [hook.remove, compiled_again]

    def _spoil(self, name: str, tick: int, done: list[bool], module: nn.Module, inputs: Any, output: Any) -> Any:
        """Returns the output with one element overwritten on the first call with gradients, unchanged otherwise."""
        if done or not torch.is_grad_enabled():
            return output
        done.append(True)
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"faults.module={name} returns a {type(output).__name__}, not a tensor: choose a module inside it"
            )
        where = random_index(output, self.seed, tick)
        say(f"activation of {name} {list(where)} = {self.value} at tick {tick}")
        output = output.clone()
        output[where] = self.value
        return output


def run_uncompiled(model: nn.Module) -> Undo:
    """Runs a model that is compiled in place without compilation, since compiled code ignores new hooks."""
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    return partial(setattr, model, "_compiled_call_impl", compiled)


def chosen_module(model: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """Returns name and module; without a name, the middle one of the modules that have parameters of their own.

    Raises:
        ConfigError: the model has no such module.
    """
    modules = dict(model.named_modules())
    if name is None:
        known = [each for each, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
        name = known[len(known) // 2]
    if name not in modules:
        raise ConfigError(f"faults.module={name} names no module: choose from {', '.join(filter(None, modules))}")
    return name, modules[name]


@dataclass(frozen=True)
class Gradient(BadNumber, StepFault):
    """One bad element in one gradient, written after the backward pass of the first micro-batch of the step.

    Attributes:
        value: new value of the unscaled gradient; a finite value is multiplied by fp16's loss scale.
        parameter: dotted name; None for the middle one of the matrices and kernels.
        seed: selects the element.
    """

    parameter: str | None = None
    seed: int = 0

    def check(self, state: TrainState) -> None:
        chosen_parameter(state.model, self.parameter)

    def inject(self, state: TrainState, precision: Any) -> list[Undo]:
        name, parameter = chosen_parameter(state.model, self.parameter)
        scale = float(precision.loss_scale()) if math.isfinite(self.value) else 1.0
        spoil = partial(self._spoil, name, state.executed_steps, scale, [])
        return [parameter.register_post_accumulate_grad_hook(spoil).remove]

    def _spoil(self, name: str, tick: int, scale: float, done: list[bool], parameter: Tensor) -> None:
        """Overwrites one element on the first call."""
        if done or parameter.grad is None:
            return
        done.append(True)
        gradient = local_shard(parameter.grad)
        if not gradient.numel():  # this rank's shard is empty
            return
        where = random_index(gradient, self.seed, tick)
        say(f"gradient of {name} {list(where)} = {self.value} at tick {tick}")
        overwrite_(gradient, where, self.value * scale)


@dataclass(frozen=True)
class LearningRate(Multiplied, UpdateFault):
    """Multiplies the learning rate for some ticks.

    Attributes:
        factor: factor of the learning rate, above 0.
        length: number of consecutive ticks, beginning at each of `at`.
    """

    returns = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor > 0:
            raise ConfigError(f"faults.factor={self.factor} is not above 0: 100 is the default")

    def inject(self, state: TrainState, precision: Any) -> list[Undo]:
        tick, planned = state.executed_steps, []

        # Restored right after the update, so that the planned learning rate is logged and saved.
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
            state.optimizer.register_step_pre_hook(raise_rates).remove,
            state.optimizer.register_step_post_hook(put_back).remove,
        ]
