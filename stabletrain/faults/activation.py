"""A bad activation: one element of one module's output is NaN, Inf, or any number, once, in the forward pass."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.faults.planned import check_number, place, say
from stabletrain.faults.step import OfStep, Removable
from stabletrain.records import TrainState


@dataclass(frozen=True)
class Activation(OfStep):
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

    def strike(self, state: TrainState, precision: Any) -> list[Removable]:
        name, module = chosen_module(state.model, self.module)
        plain = Plain(state.model)
        hook = module.register_forward_hook(partial(self._spoil, name, state.tick, []))
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
