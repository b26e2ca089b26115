"""Adam's moments behind a gate on the device: shared code of the optimizers in this package.

An optimizer that sets `_step_supports_amp_scaling` receives the guard's gate as `found_inf` (0-d, 1 if the update is to
be skipped), as PyTorch's fused kernels do. It writes with `update_moments_` and `subtract_`, which are such kernels, or
with `write_where_`. All keep every bit of the targets if the update is skipped, even if gradients are NaN. No host read
is needed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Once a second moment is Inf it stays Inf, and its coordinate never moves again. The guard skips updates with a norm
# above 1e18 (`guard/policy/limits.py`), so it matters only without a guard.
LARGEST_GRADIENT = 1.8e19
"""Bound of each gradient value, so that its square is finite in fp32."""


@dataclass(frozen=True)
class Moments:
    """The parameters of a group that have a gradient, and their state; all lists are in the same order.

    Attributes:
        weights: the parameters.
        gradients: copies, clamped to +-`LARGEST_GRADIENT`; NaN stays NaN.
        first, second: Adam's running means of g and g^2 (`exp_avg`, `exp_avg_sq`), without bias correction.
        steps: 0-d fp32 counters on the parameters' device.
        states: complete state of each parameter.
        open: 0-d bool, whether the update is applied.
        withheld: the same for fused kernels, 0-d fp32: 1 if it is not applied.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]
    states: list[dict[str, Any]]
    open: Tensor
    withheld: Tensor


def moments(optimizer: Optimizer, group: dict[str, Any], *counters: str) -> Moments | None:
    """Returns the state of a group's parameters, created on first use; None if no parameter has a gradient.

    Args:
        optimizer: the optimizer that holds the state.
        group: one of its parameter groups.
        counters: names of counters to create besides `step`, starting at 0.
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
    open_ = gate(optimizer, weights[0].device)
    return Moments(weights, gradients, first, second, steps, states, open_, (~open_).float())


def gate(optimizer: Optimizer, device: torch.device) -> Tensor:
    """Returns whether the update is applied, 0-d bool on `device`; True if `found_inf` is not set."""
    withheld = getattr(optimizer, "found_inf", None)
    return torch.ones((), dtype=torch.bool, device=device) if withheld is None else withheld.to(device) == 0


def write_where_(targets: list[Tensor], values: list[Tensor], where: Tensor) -> None:
    """Writes `values` into `targets` if `where` (0-d bool) is true; else keeps every bit of `targets`."""
    for target, value in zip(targets, values, strict=True):
        torch.where(where, value, target, out=target)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies each tensor, bit for bit and in its memory format."""
    new = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(new, tensors)  # PyTorch 2.11 has no torch._foreach_clone
    return new


def subtract_(targets: list[Tensor], amounts: list[Tensor], withheld: Tensor, decay: float = 0.0) -> None:
    """Subtracts `amounts + decay * targets` from `targets`, in place; with `withheld` (0-d fp32) 1, changes no bit."""
    # A step of SGD with learning rate 1: one kernel that knows the gate, for all tensors.
    torch._fused_sgd_(
        targets,
        amounts,
        [],
        weight_decay=decay,
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=withheld,
    )


def update_moments_(known: Moments, group: dict[str, Any]) -> None:
    """Adds `known.gradients` to the running means `known.first` and `known.second`, unless the update is withheld."""
    beta1, beta2 = group["betas"]
    # A step of AdamW with learning rate 0, on weights that are then dropped.
    unused = list(torch._foreach_mul(known.gradients, 0.0))
    torch._fused_adamw_(
        unused,
        known.gradients,
        known.first,
        known.second,
        [],
        known.steps,
        lr=0.0,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=known.withheld,
    )


def advance_(counters: list[Tensor], added: Tensor, known: Moments) -> None:
    """Adds one value of `added` (`[counters]`) to each counter, unless the update is withheld."""
    # Counters are finite, so adding 0 changes no bit.
    torch._foreach_add_(counters, list(torch.where(known.open, added, 0).to(counters[0].dtype).unbind()))


def bias_correction(beta: float, counts: Tensor) -> Tensor:
    """Returns Adam's bias correction, 1 - beta^count, for each count in float64."""
    return 1 - beta ** counts.double()  # fp32 would lose the difference for a beta near 1 in the first updates


def root_of_second(known: Moments, unbias: Tensor) -> list[Tensor]:
    """Returns sqrt(v / unbias) for each second moment v of `known`."""
    root = list(torch._foreach_sqrt(known.second))
    torch._foreach_div_(root, list(unbias.sqrt().unbind()))
    return root


def update_weights_(known: Moments, root: list[Tensor], rates: Tensor, group: dict[str, Any]) -> None:
    """Applies weight decay with the group's full learning rate, and AdamW's update with `rates`.

    Args:
        known: its moments must include this step's gradient.
        root: square roots of the bias-corrected second moments; overwritten.
        rates: float64 `[weights]`, each weight's learning rate divided by the bias correction of its first moment.
        group: provides `lr`, `weight_decay` and `eps`.
    """
    torch._foreach_add_(root, group["eps"])
    update = list(torch._foreach_div(known.first, root))
    torch._foreach_mul_(update, list(rates.unbind()))
    subtract_(known.weights, update, known.withheld, group["lr"] * group["weight_decay"])
