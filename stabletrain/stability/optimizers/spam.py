"""SPAM: AdamW that cuts single spiking coordinates, and forgets its moments every so often.

    where v > 0 and g^2 > theta v:  g <- sign(g) sqrt(theta v)         v before this step, corrected for its bias
    every `reset_interval` updates: m, v, t <- 0, and for `warmup_steps` updates the learning rate is multiplied by
                                    1 - 0.99 (1 + cos(pi k / (warmup_steps + 1))) / 2,  k = 0, 1, ...

One spiking gradient stays in m for tens of steps and in v for hundreds; the cut keeps most of it out, the reset ends
what is left. Huang et al., arXiv 2501.06842. The authors' code differs in three things: it does not restart the bias
correction at a reset; it compares with the uncorrected v, and so waits 20 steps after a reset before it cuts; and it
cuts where v = 0 as well, which freezes a coordinate that has had no gradient yet. The weight decay keeps the whole
learning rate, there and here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.stability.optimizers.gated import (
    Moments,
    bias,
    descend_,
    moments,
    remember_,
    root_of_second,
    write_,
)
from stabletrain.stability.optimizers.groups import check_moments, check_rates, decay_per_rate, decayed

LOWEST = 0.01
"""Of the learning rate, right after a reset."""


@dataclass(frozen=True)
class SPAM:
    """Spike-aware Adam with momentum reset.

    Attributes:
        lr: peak learning rate; warmup and schedule multiply it.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment; above 0.
        weight_decay: decoupled from the gradient.
        theta: how often its own running mean a squared gradient may be, above 1.
        reset_interval: updates between two resets.
        warmup_steps: updates after a reset until the whole learning rate is back; below `reset_interval`.
        decay: `coupled` multiplies the weight decay by the learning rate, `independent` by warmup and schedule only.

    Raises:
        ConfigError: a bound passed.
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
        check_rates(self.lr, self.weight_decay)
        check_moments(self.betas, self.eps)
        decay_per_rate(self.lr, self.weight_decay, self.decay)
        if not 1 < self.theta < math.inf:
            raise ConfigError(
                f"optimizer.theta={self.theta} is not above 1: ordinary gradients would be cut; "
                "5000 is the paper's; use optimizer=adamw for none"
            )
        if self.reset_interval < 1:
            raise ConfigError(f"optimizer.reset_interval={self.reset_interval} is below 1: 500 is the paper's")
        if not 0 <= self.warmup_steps < self.reset_interval:
            raise ConfigError(
                f"optimizer.warmup_steps={self.warmup_steps} is outside [0, optimizer.reset_interval="
                f"{self.reset_interval}): the whole learning rate would never be back; lower optimizer.warmup_steps"
            )

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over `model`'s trained parameters."""
        return SpikeAwareAdamW(
            decayed(model, decay_per_rate(self.lr, self.weight_decay, self.decay)),
            {
                "lr": self.lr,
                "betas": (self.betas[0], self.betas[1]),
                "eps": self.eps,
                "theta": self.theta,
                "reset_interval": self.reset_interval,
                "warmup_steps": self.warmup_steps,
                "capturable": True,
            },
        )


class SpikeAwareAdamW(Optimizer):
    """The rule above as a PyTorch optimizer.

    Its state is AdamW's with `step` counted from the last reset, so that it corrects the bias of the moments beside it,
    and `resets`, which says how many there were.
    """

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """One update of every parameter that has a gradient; where `found_inf` is 1, nothing changes."""
        for group in self.param_groups:
            if (known := moments(self, group, "resets")) is None:
                continue
            beta1, beta2 = group["betas"]
            done = torch.stack(known.steps)
            due = done >= group["reset_interval"]
            since = torch.where(due, 0, done)
            resets = torch.stack([state["resets"] for state in known.states]) + due
            kept = list((~due).float().unbind())
            first, second = (list(torch._foreach_mul(mean, kept)) for mean in (known.first, known.second))
            cut_spikes_(known, second, bias(beta2, since), group["theta"])
            remember_(known, first, second, group)
            counts = since + 1
            warm = torch.where(resets > 0, rewarmup(since, group["warmup_steps"]), 1.0)
            rates = group["lr"] * warm / bias(beta1, counts)
            descend_(known, root_of_second(known, bias(beta2, counts)), rates, group)
            write_(known.steps, list(counts.unbind()), known.open)
            write_([state["resets"] for state in known.states], list(resets.unbind()), known.open)


def cut_spikes_(known: Moments, second: list[Tensor], unbias: Tensor, threshold: float) -> None:
    """Cuts `known.gradients`, in place, to +-sqrt(threshold * v) where v > 0.

    Roots are compared, not squares, so that neither a large gradient nor threshold * v overflows.

    Args:
        known: for the gradients.
        second: v before this step's gradient.
        unbias: float64 `[tensors]`, the bias of `second`; 0 where it is all 0.
        threshold: theta.
    """
    limits = list(torch._foreach_sqrt(second))
    torch._foreach_mul_(limits, list((threshold / unbias).sqrt().unbind()))
    for limit, v in zip(limits, second, strict=True):
        limit.masked_fill_(v == 0, math.inf)
    torch._foreach_minimum_(known.gradients, limits)
    torch._foreach_maximum_(known.gradients, torch._foreach_neg(limits))


def rewarmup(since: Tensor, warmup_steps: int) -> Tensor:
    """The factor of the learning rate `since` updates after a reset; 0.01 at once, 1 from `warmup_steps` on."""
    rising = 1 - (1 - LOWEST) * (1 + torch.cos(math.pi * since.double() / (warmup_steps + 1))) / 2
    return torch.where(since < warmup_steps, rising, 1.0)
