"""StableAdamW: AdamW whose step shrinks, tensor by tensor, where the second moment is out of date.

    RMS = sqrt(mean(g^2 / max(v, eps^2)))          over a tensor, v unbiased and with g already in it
    eta = lr / max(1, RMS)
    w <- w - eta weight_decay w - eta m / (sqrt(v) + eps)

When gradients grow suddenly, v still remembers the small ones and AdamW's update is RMS times too long; here that is
divided out, as Adafactor clips its update (arXiv 1804.04235, section 6). Source: Wortsman et al., arXiv 2304.13013,
section 3.4 and algorithm 2, where loss spikes came 1 to 8 steps after the RMS had risen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.stability.optimizers.groups import TINY, check_adam, check_rates, coupled_decay, decayed
from stabletrain.stability.optimizers.moments import advance_, moments, unbiased


class StableAdamWOptimizer(Optimizer):
    """The update of the module's first lines, for groups with `lr`, `betas`, `eps` and `weight_decay`."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Updates every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            of, betas, eps = moments(self, group), tuple(group["betas"]), group["eps"]
            if not of.parameters:
                continue
            advance_(of, betas)
            m, v = unbiased(of.m, betas[0], of.steps), unbiased(of.v, betas[1], of.steps)
            for p, g, m_p, v_p in zip(of.parameters, of.gradients, m, v, strict=True):
                eta = group["lr"] / staleness(g, v_p, eps).clamp(min=1.0)
                p.mul_(1 - eta * group["weight_decay"])
                p.sub_(m_p.div_(v_p.sqrt_().add_(eps)).mul_(eta))


def staleness(g: Tensor, v: Tensor, eps: float) -> Tensor:
    """RMS(g / sqrt(v)) of a tensor, 0-d: about 1 while v follows the gradients."""
    return (g.square() / v.clamp(min=max(eps * eps, TINY))).mean().sqrt()


@dataclass(frozen=True)
class StableAdamW:
    """StableAdamW.

    Attributes:
        lr: peak learning rate.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment; above 0.
        weight_decay: decoupled from the gradient, and shrunk with the step.
        decay: `coupled` to the learning rate, or `independent` of it; see `groups.py`.
    """

    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    decay: str = "coupled"

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay, self.decay)
        check_adam(self.betas, self.eps)

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over `model`'s trained parameters."""
        groups = decayed(model, coupled_decay(self.weight_decay, self.decay, self.lr))
        return StableAdamWOptimizer(groups, self.lr, (self.betas[0], self.betas[1]), self.eps)
