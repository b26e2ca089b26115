"""Stochastic gradient descent with momentum: the default for ResNets.

    u <- momentum u + g + decay w;  w <- w - lr u            (nesterov: w <- w - lr (g + decay w + momentum u))

Momentum: Sutskever et al., ICML 2013. Norms and biases have no weight decay, as in Goyal et al., arXiv 1706.02677,
unless `no_decay` says otherwise (`parameter_roles.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from stabletrain.stability.parameter_roles import NO_DECAY, WeightDecay, check_momentum, check_rates


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD`.

    Attributes:
        lr: peak learning rate; warmup and schedule multiply it.
        momentum: in [0, 1).
        nesterov: whether to use Nesterov momentum; requires `momentum` above 0.
        weight_decay: L2 penalty, added to the gradient; at least 0.
        fused: one kernel for all parameters; False falls back to PyTorch's default implementation.
        no_decay: roles of parameters without weight decay.
    """

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    fused: bool = True
    no_decay: Sequence[str] = NO_DECAY

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_momentum(self.momentum, self.nesterov, 0.9)
        WeightDecay(self.weight_decay, without=self.no_decay)

    def __call__(self, model: nn.Module) -> Optimizer:
        """Returns the optimizer over `model`'s trainable parameters."""
        optimizer = torch.optim.SGD(
            WeightDecay(self.weight_decay, without=self.no_decay).groups(model, self.lr),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            fused=self.fused or None,
        )
        zero_momentum_(optimizer)
        return optimizer


def zero_momentum_(optimizer: torch.optim.SGD) -> None:
    """Creates the momentum of every parameter, as zeros, if it has none yet.

    PyTorch's fused kernel would create it from uninitialised memory in the first step, and leave it uninitialised if
    that step is skipped. Zeros give the same first step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else []:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
