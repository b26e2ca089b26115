"""AdamW: the default for transformers.

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    w <- w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)

Loshchilov and Hutter, arXiv 1711.05101; the moments are Adam's, arXiv 1412.6980. Fused kernels are the default: they
take the guard's gate on the device (`found_inf`), so an update is withheld without the host ever asking.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from stabletrain.stability.optimizers.groups import check_moments, check_rates, decay_per_rate, decayed


@dataclass(frozen=True)
class AdamW:
    """`torch.optim.AdamW`.

    Attributes:
        lr: peak learning rate; warmup and schedule multiply it.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment; above 0.
        weight_decay: decoupled from the gradient.
        fused: one kernel for all parameters; False falls back to PyTorch's default implementation.
        decay: `coupled` multiplies the weight decay by the learning rate, `independent` by warmup and schedule only.

    Raises:
        ConfigError: a bound passed.
    """

    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    fused: bool = True
    decay: str = "coupled"

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_moments(self.betas, self.eps)
        decay_per_rate(self.lr, self.weight_decay, self.decay)

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over `model`'s trained parameters."""
        return torch.optim.AdamW(
            decayed(model, decay_per_rate(self.lr, self.weight_decay, self.decay)),
            lr=self.lr,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            fused=self.fused or None,
        )
