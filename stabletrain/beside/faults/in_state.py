"""Faults in weights and moments: a bit flip between two steps, or a bad number that the optimizer's step has written.

A bit flips before the forward pass, as caused by a memory error.

Bit 0 is the lowest. In fp32, bits 0 to 22 are the mantissa, 23 to 30 the exponent, 31 the sign. Flipping bit 30
multiplies a weight below 1 by 2^128 (3e38); flipping bit 22 changes a weight by at most half.

A bad number is written as when the optimizer's step divides 0 by 0. Loss and gradients are finite, so only a check of
the update itself can see it. Afterwards the weights are not finite.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.beside.faults.in_step import StepFault, Undo, UpdateFault, chosen_parameter, overwrite_
from stabletrain.beside.faults.planned import BadNumber, check_at_least, local_shard, number_for, random_index, say
from stabletrain.errors import ConfigError
from stabletrain.records import TrainState

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of moments in the state of optimizers."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes."""


@dataclass(frozen=True)
class BitFlip(StepFault):
    """Flips one bit of one element.

    Attributes:
        where: `weight`; `exp_avg`, `exp_avg_sq` or `momentum_buffer`; or `moment` for the first of these that the
            optimizer has.
        bit: 0 to 31 in fp32, 0 to 15 in bf16.
        parameter: dotted name; None for the middle one of the matrices and kernels.
        seed: selects the element.
    """

    where: str = "weight"
    bit: int = 30
    parameter: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("bit", self.bit, 0)
        check_where(self.where)

    def check(self, state: TrainState) -> None:
        name, parameter = chosen_parameter(state.model, self.parameter)
        dtype = parameter.dtype if self.where == "weight" else torch.float32
        self._check_bit(name, dtype)

    def inject(self, state: TrainState, precision: Any) -> list[Undo]:
        name, parameter = chosen_parameter(state.model, self.parameter)
        kind, tensor = chosen_tensor(self.where, state.optimizer, parameter)
        if tensor is None:
            say(f"none, because the optimizer has no {kind} of {name} yet at tick {state.executed_steps}")
            return []
        self._check_bit(name, tensor.dtype)
        tensor = local_shard(tensor)
        if not tensor.numel():  # this rank's shard is empty
            return []
        if tensor.is_cuda:
            torch.cuda.synchronize()  # a snapshot may still be copying the healthy value, on a stream of its own
        where = random_index(tensor, self.seed, state.executed_steps)
        before = float(tensor[where])
        flip_(tensor, where, self.bit)
        say(
            f"bit {self.bit} of the {kind} of {name} {list(where)}, {before:g}, now {float(tensor[where]):g}, "
            f"at tick {state.executed_steps}"
        )
        return []

    def _check_bit(self, name: str, dtype: torch.dtype) -> None:
        if self.bit >= 8 * dtype.itemsize:
            raise ConfigError(
                f"faults.bit={self.bit} is above {8 * dtype.itemsize - 1}, the sign bit of {name} in {dtype}; "
                f"fix: faults.bit={8 * dtype.itemsize - 1} or less"
            )


def check_where(where: str) -> None:
    """Raises ConfigError if `where` names neither the weight nor a moment."""
    if where not in ("weight", "moment", *MOMENTS):
        raise ConfigError(f"faults.where={where} is none of weight, moment, {', '.join(MOMENTS)}")


def chosen_tensor(where: str, optimizer: Optimizer, parameter: nn.Parameter) -> tuple[str, Tensor | None]:
    """Returns kind and tensor to change; None for a moment that the optimizer has not created yet."""
    if where == "weight":
        return where, parameter.data
    kept = optimizer.state.get(parameter, {})
    names = [where] if where in MOMENTS else MOMENTS
    found = [(name, kept[name]) for name in names if isinstance(kept.get(name), Tensor)]
    return found[0] if found else (where, None)


@torch.no_grad()
def flip_(tensor: Tensor, where: tuple[int, ...], bit: int) -> None:
    """Flips one bit of one element in place; `tensor` may have any strides and dtype."""
    width = 8 * tensor.element_size()
    mask = 1 << bit if bit < width - 1 else -(1 << bit)
    tensor.view(INTEGERS[tensor.element_size()])[where] ^= mask


@dataclass(frozen=True)
class Update(BadNumber, UpdateFault):
    """One bad element in a weight or a moment, written right after the optimizer's step.

    A step whose update is withheld has no such fault: the optimizer has written nothing.

    Attributes:
        value: new value.
        where: as in `BitFlip`.
        parameter: dotted name; None for the middle one of the matrices and kernels.
        seed: selects the element.
    """

    where: str = "weight"
    parameter: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_where(self.where)

    def check(self, state: TrainState) -> None:
        chosen_parameter(state.model, self.parameter)

    def inject(self, state: TrainState, precision: Any) -> list[Undo]:
        name, parameter = chosen_parameter(state.model, self.parameter)
        tick, done = state.executed_steps, []

        def spoil(optimizer: Optimizer, *_: Any) -> None:
            """Overwrites one element after the first step of this tick that was not withheld."""
            if done or withheld(optimizer):
                return
            done.append(True)
            kind, tensor = chosen_tensor(self.where, optimizer, parameter)
            if tensor is None:
                say(f"none, because the optimizer has no {kind} of {name} after tick {tick}")
                return
            tensor = local_shard(tensor)
            if not tensor.numel():  # this rank's shard is empty
                return
            where = random_index(tensor, self.seed, tick)
            say(f"the update of tick {tick} leaves {self.value} in the {kind} of {name} {list(where)}")
            overwrite_(tensor, where, number_for(self.value, tensor.dtype))

        return [state.optimizer.register_step_post_hook(spoil).remove]


def withheld(optimizer: Optimizer) -> bool:
    """Returns whether a fused step has just left everything as it was, because the guard's gate was closed.

    The step of any other optimizer is not called then.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf)
