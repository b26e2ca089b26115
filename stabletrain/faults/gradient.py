"""A bad gradient: one element of one parameter's gradient is NaN, Inf, or any number, once, in the backward pass."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from stabletrain.faults.planned import check_number, own, place, say
from stabletrain.faults.step import OfStep, Removable, chosen_parameter, overwrite_
from stabletrain.records import TrainState


@dataclass(frozen=True)
class Gradient(OfStep):
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

    def strike(self, state: TrainState, precision: Any) -> list[Removable]:
        name, parameter = chosen_parameter(state.model, self.parameter)
        scale = float(precision.loss_scale()) if math.isfinite(self.value) else 1.0
        return [parameter.register_post_accumulate_grad_hook(partial(self._spoil, name, state.tick, scale, []))]

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
