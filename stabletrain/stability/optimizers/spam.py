"""SPAM: Adam that cuts single spiking coordinates, and forgets its moments now and then.

    g_i <- sign(g_i) sqrt(theta v_i)   where g_i^2 > theta v_i and v_i > 0         v of the step before, as it lies
    every `reset_interval` updates:  m = v = 0, the bias correction starts again, and the learning rate rises once more
    from 1 % to its value along half a cosine of `warmup_steps` updates

A spike that enters the moments lengthens, or shortens, updates for hundreds of steps; here it is cut before it enters,
and what entered is forgotten at the next reset. Source: Huang et al., arXiv 2501.06842, section 4 and algorithm 1.

Two things are done otherwise than in the authors' code. A coordinate with v = 0 is not cut: its bound would be 0, and a
token that was never seen could never be learned. And a reset restarts the bias correction: with the old step count the
first updates after it would be many times too short, or, with betas far apart, too long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.stability.optimizers.groups import check_adam, check_rates, coupled_decay, decayed
from stabletrain.stability.optimizers.moments import advance_, moments, unbiased


class SPAMOptimizer(Optimizer):
    """The update of the module's first lines; each parameter counts its own updates and resets."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        theta: float,
        reset_interval: int,
        warmup_steps: int,
    ) -> None:
        own = {"theta": theta, "reset_interval": reset_interval, "warmup_steps": warmup_steps}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, **own})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Updates every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            of, betas = moments(self, group), tuple(group["betas"])
            if not of.parameters:
                continue
            for p, step in zip(of.parameters, of.steps, strict=True):
                if step.item() >= group["reset_interval"]:
                    forget(self.state[p])
            cut = [spike_free(g, v, group["theta"]) for g, v in zip(of.gradients, of.v, strict=True)]
            of = of._replace(gradients=cut)
            advance_(of, betas)
            m, v = unbiased(of.m, betas[0], of.steps), unbiased(of.v, betas[1], of.steps)
            for p, m_p, v_p in zip(of.parameters, m, v, strict=True):
                state = self.state[p]
                rise = rewarmed(state["step"].item() - 1, group["warmup_steps"]) if state.get("resets") else 1.0
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(m_p, v_p.sqrt_().add_(group["eps"]), value=-group["lr"] * rise)


def forget(state: dict[str, Any]) -> None:
    """Zeroes a parameter's moments and its count of updates since; counts the reset."""
    for name in ("exp_avg", "exp_avg_sq", "step"):
        state[name].zero_()
    state["resets"] = state.get("resets", 0) + 1


def spike_free(g: Tensor, v: Tensor, theta: float) -> Tensor:
    """The gradient with each coordinate cut to `sqrt(theta v)`, where v is above 0."""
    bound = v.sqrt() * math.sqrt(theta)  # theta v itself may pass fp32's largest number
    return torch.where(v > 0, torch.minimum(torch.maximum(g, -bound), bound), g)


def rewarmed(updates: float, length: int) -> float:
    """Factor of the learning rate so many updates after a reset: 1 % at first, 1 from `length` on."""
    return 1 - 0.99 * 0.5 * (1 + math.cos(math.pi * updates / length)) if updates < length else 1.0


@dataclass(frozen=True)
class SPAM:
    """SPAM.

    Attributes:
        lr: peak learning rate.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment; above 0.
        weight_decay: decoupled from the gradient.
        theta: a squared coordinate may be so many times its second moment.
        reset_interval: updates after which the moments are forgotten.
        warmup_steps: updates over which the learning rate rises again after that; 0 for none.
        decay: `coupled` to the learning rate, or `independent` of it; see `groups.py`.
    """

    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    theta: float
    reset_interval: int
    warmup_steps: int
    decay: str = "coupled"

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay, self.decay)
        check_adam(self.betas, self.eps)
        if not self.theta >= 1:
            raise ConfigError(
                f"optimizer.theta={self.theta} is below 1: gradients that follow their second moment would be cut; "
                "5000 is customary"
            )
        if self.reset_interval < 1:
            raise ConfigError(f"optimizer.reset_interval={self.reset_interval} is below 1: 500 is customary")
        if not 0 <= self.warmup_steps < self.reset_interval:
            raise ConfigError(
                f"optimizer.warmup_steps={self.warmup_steps} is outside [0, optimizer.reset_interval="
                f"{self.reset_interval}): the learning rate would never be back before the next reset; 150 of 500 is "
                "customary"
            )

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over `model`'s trained parameters."""
        return SPAMOptimizer(
            decayed(model, coupled_decay(self.weight_decay, self.decay, self.lr)),
            self.lr,
            (self.betas[0], self.betas[1]),
            self.eps,
            self.theta,
            self.reset_interval,
            self.warmup_steps,
        )
