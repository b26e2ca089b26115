"""Adam's moments, for the optimizers that do something of their own with them.

m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2        both 0 at first
unbiased:  m / (1 - beta1^t),  v / (1 - beta2^t)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class Moments(NamedTuple):
    """The parameters of a group that have a gradient, and Adam's state of each, as lists in one order.

    Attributes:
        parameters, gradients: fp32.
        m, v: fp32, of the parameters' shapes and memory formats.
        steps: 0-d fp32 on the CPU, updates since the moments were 0.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    steps: list[Tensor]


def moments(optimizer: Optimizer, group: dict[str, Any]) -> Moments:
    """The moments of a group, made where there are none yet."""
    parameters = [p for p in group["params"] if p.grad is not None]
    for p in parameters:
        state = optimizer.state[p]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    states = [optimizer.state[p] for p in parameters]
    return Moments(
        parameters,
        [p.grad for p in parameters if p.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["step"] for state in states],
    )


def advance_(of: Moments, betas: tuple[float, float]) -> None:
    """Takes the gradients into the moments, in place, and counts the update."""
    if not of.parameters:
        return
    torch._foreach_add_(of.steps, 1.0)
    torch._foreach_lerp_(of.m, of.gradients, 1 - betas[0])
    torch._foreach_mul_(of.v, betas[1])
    torch._foreach_addcmul_(of.v, of.gradients, of.gradients, 1 - betas[1])


def unbiased(values: list[Tensor], beta: float, steps: list[Tensor]) -> list[Tensor]:
    """First or second moments without the bias of their start at 0."""
    return list(torch._foreach_div(values, [1 - beta ** step.item() for step in steps]))
