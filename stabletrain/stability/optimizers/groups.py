"""What the optimizers share: which parameters are decayed, how strongly, and the bounds of their numbers.

Weight decay goes to matrices and convolution kernels only: norms, biases and embeddings are left alone, since pulling
them to 0 regularises nothing. It is one of two kinds:

    coupled       w <- w - lr_t weight_decay w                   PyTorch's AdamW: a lower learning rate decays less
    independent   w <- w - (lr_t / lr) weight_decay w            lr_t / lr: warmup and schedule alone

Independent decay leaves weights of the same size at every learning rate, which is what makes rates comparable
(Wortsman et al., arXiv 2309.14322, section 3.2.2; as AdamW was first written down, arXiv 1711.05101).
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.stability.roles import embeddings

DECAYS = ("coupled", "independent")
TINY = torch.finfo(torch.float32).tiny
"""Smallest normal fp32, 1.2e-38: what is added to a divisor must not vanish in fp32."""


def decayed(model: nn.Module, weight_decay: float, without: Collection[Tensor] = ()) -> list[dict]:
    """Two parameter groups: with weight decay (matrices, kernels), and without (norms, biases, embeddings).

    A parameter that an embedding and a head share counts as an embedding. Frozen parameters are left out, and those
    in `without`, which another optimizer has.
    """
    tables = {id(parameter) for table in embeddings(model) for parameter in table.parameters(recurse=False)}
    taken = {id(parameter) for parameter in without}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    with_decay = [p for p in trained if p.ndim >= 2 and id(p) not in tables]
    rest = [p for p in trained if p.ndim < 2 or id(p) in tables]
    groups = [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def coupled_decay(weight_decay: float, decay: str, lr: float) -> float:
    """The factor that, times the learning rate of a step, is that step's weight decay."""
    return weight_decay / lr if decay == "independent" else weight_decay


def check_rates(lr: float, weight_decay: float, decay: str = "coupled") -> None:
    """Raises ConfigError where the learning rate or the weight decay is out of bounds."""
    if not lr > 0:
        raise ConfigError(f"optimizer.lr={lr} is not above 0: nothing would be learned")
    if not weight_decay >= 0:
        raise ConfigError(f"optimizer.weight_decay={weight_decay} is below 0: use 0 for none")
    if decay not in DECAYS:
        raise ConfigError(f"optimizer.decay={decay} is unknown: choose coupled or independent")
    if decay == "independent" and weight_decay >= 1:
        raise ConfigError(
            f"optimizer.weight_decay={weight_decay} with optimizer.decay=independent takes away all of a weight in one "
            "step: 1e-4 is customary"
        )


def check_adam(betas: Sequence[float], eps: float) -> None:
    """Raises ConfigError where Adam's numbers are out of bounds."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optimizer.betas={list(betas)} are not two numbers in [0, 1): [0.9, 0.95] is customary")
    if not eps >= TINY:
        raise ConfigError(
            f"optimizer.eps={eps} is below {TINY:.2g}: the update would divide by 0 in fp32; 1e-8 is customary"
        )
