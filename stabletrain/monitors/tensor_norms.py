"""Norms of gradients, weights, updates and buffers.

    update ratio  = RMS(w_after - w_before) / RMS(w_before)          healthy: about 1e-3
    g / sqrt(v)   = sqrt(mean(g^2 / max(v, eps^2)))                  healthy: about 1; above 1, v is out of date
    g / eps       = RMS(g) / eps                                     near 1, Adam's update collapses

g is the clipped gradient that the optimizer saw. v is Adam's second moment after the update (it includes g), divided
by 1 - beta2^t. g / sqrt(v) is RMS_t of arXiv 2304.13013, section 3.2, where loss spikes followed its rise by 1 to 8
steps. g / eps is from arXiv 2309.14322, section 3.4.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.model_tensors import ModelTensors, tensors_of
from stabletrain.records import GradNorms, Number


def gradients(model: nn.Module | ModelTensors) -> list[Tensor]:
    """Returns all gradients in the order of `model.parameters()`; for sharded gradients, this rank's shard (a view).

    Args:
        model: or its tensors, if they were just found.
    """
    tensors = model if isinstance(model, ModelTensors) else tensors_of(model)
    found: list[Any] = [grad for p in tensors.parameters if (grad := p.grad) is not None]
    return [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in found]


def measure(model: nn.Module) -> GradNorms:
    """Returns L2 norms of the gradients, per parameter and total; fp32, on their device, without host synchronisation.

    A NaN or Inf in any gradient makes the total non-finite. So does a norm above 1.8e19, whose square overflows fp32.
    The total is 0 without gradients. For sharded gradients the norms are those of this rank's shards.
    """
    return measure_all(gradients(model), [])[0]


def measure_all(found: list[Tensor], buffers: list[Tensor]) -> tuple[GradNorms, Number]:
    """Returns `measure`'s norms of gradients, and the L2 norm over buffers, non-finite if one is; 0 without buffers.

    Args:
        found: the gradients, in the order of `model.parameters()`.
        buffers: floating-point buffers.
    """
    # A flipped bit can make a weight huge. A following BatchNorm hides that from loss and gradients, but its running
    # statistics show it.
    if not found and not buffers:
        return GradNorms(total=torch.zeros(()), each=torch.zeros(1)), 0.0
    sizes = torch.stack(lengths([*found, *buffers]))
    each = sizes[: len(found)] if found else torch.zeros_like(sizes[:1])
    buffer_norm = torch.linalg.vector_norm(sizes[len(found) :]) if buffers else 0.0
    return GradNorms(total=torch.linalg.vector_norm(each), each=each), buffer_norm


def lengths(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each tensor, 0-d fp32; of fp64 tensors, computed in fp64."""
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return [torch.linalg.vector_norm(tensor).float() for tensor in tensors]
    return [*torch._foreach_norm(tensors, 2, dtype=torch.float32)]


def norms(tensors: list[Tensor]) -> Float[Tensor, " tensors"]:
    """Returns the L2 norm of each tensor, fp32."""
    if not any(hasattr(tensor, "to_local") for tensor in tensors):
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return torch.stack([number(torch.linalg.vector_norm(tensor.float())) for tensor in tensors])


def zero_shares(tensors: list[Tensor]) -> Float[Tensor, " tensors"]:
    """Returns the share of each tensor's values that are exactly 0."""
    return torch.stack([1 - number((tensor != 0).sum()) / tensor.numel() for tensor in tensors])


def number(value: Any) -> Tensor:
    """Reduces a 0-d sharded tensor over its ranks; returns any other tensor unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


TINY = torch.finfo(torch.float32).tiny
"""Lower bound of eps^2: a smaller eps^2 underflows to 0, and 0 / 0 would follow."""


class Adaptive:
    """The parameters that have an Adam-like second moment, with their gradients, moments and hyperparameters.

    Such a parameter has `exp_avg_sq` and `step` in the optimizer's state and `betas` and `eps` in its group.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        self.names = [
            name
            for name, p in parameters.items()
            if {"exp_avg_sq", "step"} <= optimizer.state.get(p, {}).keys()
            and {"betas", "eps"} <= group_of.get(p, {}).keys()
        ]
        owners = [parameters[name] for name in self.names]
        self.gradients = [p.grad for p in owners if p.grad is not None]
        self.eps = [float(group_of[p]["eps"]) for p in owners]
        self._moments = [optimizer.state[p]["exp_avg_sq"] for p in owners]
        self._steps = [optimizer.state[p]["step"] for p in owners]
        self._beta2 = [float(group_of[p]["betas"][1]) for p in owners]

    def g_over_sqrt_v(self) -> Float[Tensor, " tensors"]:
        """Returns the RMS of g / sqrt(v) of each tensor, fp32; about 1 at the first step if g is above eps."""
        out = []
        for g, v, step, beta2, eps in zip(
            self.gradients, self._moments, self._steps, self._beta2, self.eps, strict=True
        ):
            bias = 1 - beta2 ** torch.as_tensor(step, dtype=torch.float64, device=v.device)
            unbiased = v.float() / bias.clamp(min=torch.finfo(torch.float64).eps)  # at step 0 the bias is 0
            out.append(number((g.float().square() / unbiased.clamp(min=max(eps**2, TINY))).mean()).sqrt())
        return torch.stack(out)
