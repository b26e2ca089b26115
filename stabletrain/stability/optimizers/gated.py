"""Adam's moments and updates behind a gate on the device: shared code of the optimizers in this package.

An optimizer that sets `_step_supports_amp_scaling` receives the guard's gate as `found_inf` (0-d, 1 if the update is to
be skipped), as PyTorch's fused kernels do. It writes with `update_moments_` and `subtract_`, which are such kernels, or
with `write_where_`. All keep every bit of the targets if the update is skipped, even if gradients are NaN. No host read
is needed.

On sharded weights everything is computed on this rank's parts, which are views, except for norms of whole tensors
(`parallel/shards.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.optim import Optimizer

from stabletrain.monitors.tensor_norms import lengths
from stabletrain.parallel.shards import local_parts, norms_over_shards
from stabletrain.records import ScaleUpdate

# Once a second moment is Inf it stays Inf, and its coordinate never moves again. The guard skips updates with a norm
# above 1e18 (`guard/policy/limits.py`), so it matters only without a guard.
LARGEST_GRADIENT = 1.8e19
"""Bound of each gradient value, so that its square is finite in fp32."""


class GatedOptimizer(Optimizer):
    """Base class of optimizers that take the gate as `found_inf`, and that show their update before they apply it.

    Attributes:
        scale_update: set for each step by `step.apply`; None if the update is not clipped.
        communicates: whether the update itself needs other ranks, so that none of them can repeat it alone.
    """

    _step_supports_amp_scaling = True
    scale_update: ScaleUpdate | None = None

    @property
    def communicates(self) -> bool:
        """See the class."""
        return False


@dataclass(frozen=True)
class Moments:
    """The parameters of a group that have a gradient, and their state; all lists are in the same order.

    Attributes:
        weights: the parameters; the other tensors are this rank's parts, if these are sharded.
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
    gradients = list(torch._foreach_clamp_max(local_parts(w.grad for w in weights), LARGEST_GRADIENT))
    torch._foreach_clamp_min_(gradients, -LARGEST_GRADIENT)
    first, second = (local_parts(state[name] for state in states) for name in ("exp_avg", "exp_avg_sq"))
    steps = [state["step"] for state in states]
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


def subtract_(targets: list[Tensor], amounts: list[Tensor], withheld: Tensor, decay: float = 0.0) -> None:
    """Subtracts `amounts + decay * targets` from `targets`, in place; with `withheld` (0-d fp32) 1, changes no bit.

    Each amount needs the strides of its target: the kernel reads both in the order of their memory.
    """
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


@dataclass(frozen=True)
class Update:
    """What a step will subtract from weights, besides their decay; both lists are in the same order.

    Attributes:
        weights: the weights.
        amounts: the update of each, times the learning rate, of this rank's part; overwritten when it is applied.
        lr: that learning rate.
        decay: weight decay times learning rate: the fraction of a weight that is subtracted too.
        cautious: whether only the weights of `cautious` decay.
        withheld: 0-d fp32, 1 if nothing is to be written.
    """

    weights: list[Tensor]
    amounts: list[Tensor]
    lr: float
    decay: float
    cautious: bool
    withheld: Tensor


def adam_update(known: Moments, root: list[Tensor], rates: Tensor, group: dict[str, Any]) -> Update:
    """Returns AdamW's update with `rates`; its weight decay has the group's full learning rate.

    Args:
        known: its moments must include this step's gradient.
        root: square roots of the bias-corrected second moments; overwritten.
        rates: float64 `[weights]`, each weight's learning rate divided by the bias correction of its first moment.
        group: provides `lr`, `weight_decay`, `eps` and `cautious`.
    """
    torch._foreach_add_(root, group["eps"])
    amounts = list(torch._foreach_div(known.first, root))
    torch._foreach_mul_(amounts, list(rates.unbind()))
    lr = group["lr"]
    return Update(known.weights, amounts, lr, lr * group["weight_decay"], group.get("cautious", False), known.withheld)


def update_weights_(optimizer: Optimizer, updates: Sequence[Update]) -> None:
    """Applies a step's updates, all of which `optimizer` must give at once, and weight decay.

    If the step clips the update, `optimizer.scale_update` returns the factor. It scales the update alone: weight decay
    does not depend on gradients, so a spike of the update is no reason to decay less.
    """
    scale: ScaleUpdate | None = getattr(optimizer, "scale_update", None)
    if scale is not None and updates:
        factor = scale(partial(norm_per_rate, updates), gate(optimizer, updates[0].withheld.device))
        for update in updates:
            torch._foreach_mul_(update.amounts, factor)
    for update in updates:
        weights, decay = local_parts(update.weights), update.decay
        if update.cautious and decay:
            # The decay is part of the amounts then: the kernel below would decay every weight.
            torch._foreach_add_(update.amounts, cautious(weights, update.amounts), alpha=decay)
            decay = 0.0
        subtract_(weights, update.amounts, update.withheld, decay)


def norm_per_rate(updates: Sequence[Update]) -> Float32[Tensor, ""]:
    """Returns the L2 norm of all updates, each divided by its learning rate; NaN at a learning rate of 0.

    Without the learning rate, because warmup and schedule are no reason to clip.
    """
    norms = torch.cat([torch.stack(lengths(each.amounts)) / each.lr for each in updates])
    return torch.linalg.vector_norm(norms_over_shards(norms, [weight for each in updates for weight in each.weights]))


def cautious(weights: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    """Returns new tensors: each weight where its update, which is subtracted, has the same sign or is 0; else 0.

    Cautious weight decay: u w >= 0, so that decay and update move the weight the same way. Chen et al., arXiv
    2510.12402, algorithm 1.
    """
    # From the signs, because a product could underflow: their product is -1, 0 or 1, so the mask is 0, 1 or 1.
    mask = torch._foreach_sign(weights)
    torch._foreach_mul_(mask, torch._foreach_sign(updates))
    torch._foreach_add_(mask, 1.0)
    torch._foreach_clamp_max_(mask, 1.0)
    torch._foreach_mul_(mask, weights)
    return list(mask)
