"""AdamW: PyTorch's own, over the field's parameter groups (Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from stabletrain.stability.optimizers.groups import check_adam, check_rates, coupled_decay, decayed


@dataclass(frozen=True)
class AdamW:
    """`torch.optim.AdamW`.

    Attributes:
        lr: peak learning rate; warmup and schedule multiply it.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment; above 0.
        weight_decay: decoupled from the gradient.
        decay: `coupled` to the learning rate, as PyTorch does, or `independent` of it; see `groups.py`.
        fused: one kernel for all parameters; False falls back to PyTorch's default implementation.
    """

    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    fused: bool = True
    decay: str = "coupled"

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay, self.decay)
        check_adam(self.betas, self.eps)

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over `model`'s trained parameters."""
        return torch.optim.AdamW(
            decayed(model, coupled_decay(self.weight_decay, self.decay, self.lr)),
            lr=self.lr,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            fused=self.fused or None,
        )
