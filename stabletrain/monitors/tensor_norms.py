"""Norms of gradients, weights, updates and buffers.

Norms of gradients and buffers, each measured once a step in one pass, before anything judges or clips them.

Gradients, weights and updates: how large they are, tensor by tensor, and summed up by place.

    update ratio  = RMS(w_after - w_before) / RMS(w_before)          some 1e-3 is healthy
    g / sqrt(v)   = sqrt(mean(g^2 / max(v, eps^2)))                  some 1 is healthy; above it v is out of date
    g / eps       = RMS(g) / eps                                     near 1 Adam's update collapses

v is Adam's second moment after the update, so with g already in it, divided by 1 - beta2^t; this is the RMS_t of arXiv
2304.13013, section 3.2, where loss spikes followed its rise by 1 to 8 steps. The last is from arXiv 2309.14322, section
3.4. g is the gradient as the optimizer saw it: clipped.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.records import GradNorms


def gradients(model: nn.Module) -> list[Tensor]:
    """Every gradient there is, in the order of `model.parameters()`; of a sharded one this rank's part, in place."""
    found: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    return [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in found]


def measure(model: nn.Module) -> GradNorms:
    """L2 norms of the gradients as they lie, per parameter and over all; fp32, on their device, without a host read.

    A NaN or an Inf in any gradient makes the total non-finite, and so does a square sum past 3.4e38: a norm above
    1.8e19 is as unsafe as an infinite one. A model without gradients has norm 0. Of sharded gradients the norms are
    those of this rank's parts.
    """
    found = gradients(model)
    if not found:
        zero = torch.zeros(())
        return GradNorms(total=zero, each=zero[None])
    each = torch.stack(torch._foreach_norm(found, 2, dtype=torch.float32))
    return GradNorms(total=torch.linalg.vector_norm(each), each=each)


def buffer_norm(model: nn.Module) -> Tensor:
    """L2 norm over the floating-point buffers (BatchNorm's statistics); 0-d fp32, on their device, no host read.

    A buffer that is not finite makes it so. Weights as large as a flipped bit leaves them may hide behind a
    normalisation from loss and gradients, but not from its statistics.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return torch.zeros((), device=next(model.parameters()).device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(buffers, 2, dtype=torch.float32)))


def norms(tensors: list[Tensor]) -> Float[Tensor, " tensors"]:
    """L2 norm of each, fp32; in one pass, but for sharded ones."""
    if not any(hasattr(tensor, "to_local") for tensor in tensors):
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return torch.stack([number(torch.linalg.vector_norm(tensor.float())) for tensor in tensors])


def zero_shares(tensors: list[Tensor]) -> Float[Tensor, " tensors"]:
    """Share of each tensor's values that are exactly 0."""
    return torch.stack([1 - number((tensor != 0).sum()) / tensor.numel() for tensor in tensors])


def number(value: Any) -> Tensor:
    """A 0-d tensor as it is; of sharded tensors, what all ranks together make it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


TINY = torch.finfo(torch.float32).tiny
"""Below it a squared eps is 0, and 0 / 0 would follow."""


class Adaptive:
    """Those of `parameters` that `optimizer` gives an Adam-like second moment, and its numbers for them.

    Such an optimizer keeps `exp_avg_sq` and `step` for a parameter, and `betas` and `eps` in its group.
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
        """Root mean square of g / sqrt(v) of each tensor, fp32; about 1 at the first step, where g is above eps."""
        out = []
        for g, v, step, beta2, eps in zip(
            self.gradients, self._moments, self._steps, self._beta2, self.eps, strict=True
        ):
            unbiased = v.float() / at_least_eps(
                1 - beta2 ** torch.as_tensor(step, dtype=torch.float64, device=v.device)
            )
            out.append(number((g.float().square() / unbiased.clamp(min=max(eps**2, TINY))).mean()).sqrt())
        return torch.stack(out)


def at_least_eps(bias: Tensor) -> Tensor:
    """A bias correction that a counter at 0 does not make 0."""
    return bias.clamp(min=torch.finfo(torch.float64).eps)
