"""StableAdamW: AdamW whose learning rate shrinks, tensor by tensor, when its second moment has fallen behind.

    RMS = sqrt(mean(g^2 / max(v / (1 - b2^t), eps^2)))       v already holds this step's g
    lr  <- lr / max(1, RMS)                                  of this tensor, in this step; not of the weight decay

When gradients grow faster than v remembers, AdamW's update is too long; RMS says by how much (Adafactor's update
clipping, arXiv 1804.04235, put into AdamW). With RMS <= 1 it is AdamW. Wortsman et al., arXiv 2304.13013, section 3.5:
loss spikes follow 1 to 8 steps after RMS rises; the authors' code decays by the whole learning rate, as here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.stability.optimizers.gated import bias, copies, descend_, moments, remember_, root_of_second, write_
from stabletrain.stability.optimizers.groups import check_moments, check_rates, decay_per_rate, decayed


@dataclass(frozen=True)
class StableAdamW:
    """AdamW with update clipping.

    Attributes:
        lr: peak learning rate; warmup and schedule multiply it.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment, and the least it counts for in RMS; above 0.
        weight_decay: decoupled from the gradient.
        decay: `coupled` multiplies the weight decay by the learning rate, `independent` by warmup and schedule only.

    Raises:
        ConfigError: a bound passed.
    """

    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    decay: str = "coupled"

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_moments(self.betas, self.eps)
        decay_per_rate(self.lr, self.weight_decay, self.decay)

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over `model`'s trained parameters."""
        return CappedAdamW(
            decayed(model, decay_per_rate(self.lr, self.weight_decay, self.decay)),
            {"lr": self.lr, "betas": (self.betas[0], self.betas[1]), "eps": self.eps, "capturable": True},
        )


class CappedAdamW(Optimizer):
    """The rule above as a PyTorch optimizer; its state is AdamW's: `step`, `exp_avg`, `exp_avg_sq`."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """One update of every parameter that has a gradient; where `found_inf` is 1, nothing changes."""
        for group in self.param_groups:
            if (known := moments(self, group)) is None:
                continue
            beta1, beta2 = group["betas"]
            counts = torch.stack(known.steps) + 1
            remember_(known, copies(known.first), copies(known.second), group)
            root = root_of_second(known, bias(beta2, counts))
            rates = group["lr"] / bias(beta1, counts) / rms(known.gradients, root, group["eps"]).clamp(min=1)
            descend_(known, root, rates, group)
            write_(known.steps, list(counts.unbind()), known.open)


def rms(gradients: list[Tensor], root: list[Tensor], eps: float) -> Tensor:
    """sqrt(mean(g^2 / max(v, eps^2))) of each tensor, with `root` = sqrt(v); `[tensors]`, about 1 as a rule."""
    ratios = torch._foreach_div(gradients, torch._foreach_clamp_min(root, eps))
    return torch.stack(
        [norm / ratio.numel() ** 0.5 for norm, ratio in zip(torch._foreach_norm(ratios), ratios, strict=True)]
    )
