"""Adam's moments behind a gate on the device: what the optimizers written here share.

An optimizer that sets `_step_supports_amp_scaling` is handed the guard's gate as `found_inf` (0-d, 1 where the update
is withheld), as PyTorch's fused kernels are. What it computes is then written through `write_`, which leaves every bit
of a withheld update's targets as it was, whatever the gradients hold. So the host never asks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

LARGEST_GRADIENT = 1.8e19
"""Its square is the largest that fp32 holds. A larger gradient is cut to it: a second moment that is Inf once stays so,
and its coordinate would never move again. The guard withholds a norm beyond it (`monitors/tensor_norms.py`), so that
this is met with the guard off, or by a model of a single value."""


@dataclass(frozen=True)
class Moments:
    """The parameters of a group that have a gradient, and their state; lists in the same order.

    Attributes:
        weights: the parameters.
        gradients: copies, each value within +-`LARGEST_GRADIENT`; NaN stays NaN.
        first, second: Adam's running means of g and g^2 (`exp_avg`, `exp_avg_sq`), not corrected for their bias.
        steps: 0-d fp32 counters on the parameters' device.
        states: their whole state.
        open: 0-d bool, whether the update may be written.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]
    states: list[dict[str, Any]]
    open: Tensor


def moments(optimizer: Optimizer, group: dict[str, Any], *counters: str) -> Moments | None:
    """The state of a group's parameters, made on first use; None where no parameter has a gradient.

    Args:
        optimizer: whose state it is.
        group: one of its groups.
        counters: names of further counters, beside `step`, made with value 0.
    """
    weights = [p for p in group["params"] if p.grad is not None]
    if not weights:
        return None
    for weight in weights:
        state = optimizer.state[weight]
        if not state:
            state |= {name: torch.zeros((), device=weight.device) for name in ("step", *counters)}
            state |= {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
    states = [optimizer.state[weight] for weight in weights]
    gradients = list(torch._foreach_clamp_max([w.grad for w in weights], LARGEST_GRADIENT))
    torch._foreach_clamp_min_(gradients, -LARGEST_GRADIENT)
    first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    return Moments(weights, gradients, first, second, steps, states, gate(optimizer, weights[0].device))


def gate(optimizer: Optimizer, device: torch.device) -> Tensor:
    """Whether the update may be written, 0-d bool on `device`: always, where nobody set `found_inf`."""
    withheld = getattr(optimizer, "found_inf", None)
    return torch.ones((), dtype=torch.bool, device=device) if withheld is None else withheld.to(device) == 0


def write_(targets: list[Tensor], values: list[Tensor], where: Tensor) -> None:
    """Writes `values` into `targets` if `where` (0-d bool) is true; else every bit of them stays."""
    for target, value in zip(targets, values, strict=True):
        torch.where(where, value, target, out=target)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """A copy of each tensor, bit for bit and in its memory format; on CUDA, one kernel for many of them."""
    new = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(new, tensors)  # torch._foreach_clone does it in one call, but PyTorch 2.11 has none
    return new


def remember_(known: Moments, first: list[Tensor], second: list[Tensor], group: dict[str, Any]) -> None:
    """Mixes `known.gradients` into the running means `first` and `second`, in place, and writes them to the state."""
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(first, known.gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, known.gradients, known.gradients, 1 - beta2)
    write_(known.first, first, known.open)
    write_(known.second, second, known.open)


def bias(beta: float, counts: Tensor) -> Tensor:
    """1 - beta^count for each count, float64: the share of its final weight that a running mean has by then."""
    return 1 - beta ** counts.double()


def root_of_second(known: Moments, unbias: Tensor) -> list[Tensor]:
    """sqrt(v / bias) for each second moment of `known`; `unbias` holds their biases."""
    root = list(torch._foreach_sqrt(known.second))
    torch._foreach_div_(root, list(unbias.sqrt().unbind()))
    return root


def descend_(known: Moments, root: list[Tensor], rates: Tensor, group: dict[str, Any]) -> None:
    """Decays the weights by the group's whole learning rate, and moves them by AdamW's update.

    Args:
        known: with the moments as they are after this step's gradient.
        root: sqrt of the second moments, corrected for their bias; overwritten.
        rates: float64 `[weights]`, the learning rate of each over the bias of its first moment.
        group: for `lr`, `weight_decay` and `eps`.
    """
    torch._foreach_add_(root, group["eps"])
    update = list(torch._foreach_div(known.first, root))
    torch._foreach_mul_(update, list(rates.unbind()))
    moved = list(torch._foreach_mul(known.weights, 1 - group["lr"] * group["weight_decay"]))
    torch._foreach_sub_(moved, update)
    write_(known.weights, moved, known.open)
