"""Optimizers: PyTorch's own, with the field's parameter groups.

Weight decay goes to matrices and convolution kernels only: norms, biases and embeddings are left alone, since pulling
them to 0 regularises nothing. Fused kernels are the default: they take the guard's gate on the device (`found_inf`),
so an update is withheld without the host ever asking.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError


def decayed(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups: with weight decay (matrices, kernels), and without (norms, biases, embeddings).

    A parameter that an embedding and a head share counts as an embedding. Frozen parameters are left out.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    trained = [p for p in model.parameters() if p.requires_grad]
    with_decay = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    without = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def check_rates(lr: float, weight_decay: float) -> None:
    """Raises ConfigError where the learning rate or the weight decay is out of bounds."""
    if not lr > 0:
        raise ConfigError(f"optimizer.lr={lr} is not above 0: nothing would be learned")
    if not weight_decay >= 0:
        raise ConfigError(f"optimizer.weight_decay={weight_decay} is below 0: use 0 for none")


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101): `torch.optim.AdamW`.

    Attributes:
        lr: peak learning rate; warmup and schedule multiply it.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment; above 0.
        weight_decay: decoupled, multiplied by the learning rate as PyTorch does.
        fused: one kernel for all parameters; False falls back to PyTorch's default implementation.
    """

    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    fused: bool = True

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"optimizer.betas={list(self.betas)} are not two numbers in [0, 1): [0.9, 0.95] is customary"
            )
        if not self.eps > 0:
            raise ConfigError(
                f"optimizer.eps={self.eps} is not above 0: the update would divide by 0; 1e-8 is customary"
            )

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over `model`'s trained parameters."""
        return torch.optim.AdamW(
            decayed(model, self.weight_decay),
            lr=self.lr,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            fused=self.fused or None,
        )


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum: `torch.optim.SGD`.

    Attributes:
        lr: peak learning rate.
        momentum: in [0, 1).
        nesterov: look ahead along the momentum, which must then be above 0.
        weight_decay: L2, added to the gradient.
        fused: one kernel for all parameters; False falls back to PyTorch's default implementation.
    """

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    fused: bool = True

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum={self.momentum} is outside [0, 1): 0.9 is customary")
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov=true with optimizer.momentum=0 does nothing: set a momentum")

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over `model`'s trained parameters."""
        return torch.optim.SGD(
            decayed(model, self.weight_decay),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            fused=self.fused or None,
        )
