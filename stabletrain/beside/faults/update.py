"""A bad number in a weight or moment that the optimizer's step has just written, as when it divides 0 by 0.

Loss and gradients are finite, so only a check of the update itself can see it. Afterwards the weights are not finite.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from stabletrain.beside.faults.bit_flip import check_where, chosen_tensor
from stabletrain.beside.faults.in_step import Undo, UpdateFault, chosen_parameter, overwrite_
from stabletrain.beside.faults.planned import BadNumber, local_shard, number_for, random_index, say
from stabletrain.records import TrainState


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
