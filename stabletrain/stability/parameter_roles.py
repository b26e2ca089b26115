"""Roles of parameters: which module is the head, and which parameters have weight decay.

Weight decay applies to matrices and convolution kernels only, not to norms, biases and embeddings. It has two forms,
with f the factor of warmup and schedule:

    coupled:      w <- w - lr f decay w      PyTorch's: the peak learning rate changes the strength of the decay
    independent:  w <- w - f decay w         Loshchilov and Hutter, arXiv 1711.05101; arXiv 2309.14322 compares learning
                                             rates with this form (section 3.2.2)
"""

import inspect
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError


def classifier(model: nn.Module) -> nn.Module | None:
    """Returns the module whose weight computes the logits: `model.classifier()`, else the last `nn.Linear`, else None.

    For a GPT with a tied head this is the embedding.
    """
    named = getattr(model, "classifier", None)
    module = isinstance(named, nn.Module)
    # A method with parameters is not the accessor: it may be the forward pass of a head.
    if callable(named) and not module and not inspect.signature(named).parameters:
        return named()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linears[-1] if linears else None


def embeddings(model: nn.Module) -> list[nn.Module]:
    """Returns every embedding module of the model."""
    return [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]


SMALLEST_EPS = torch.finfo(torch.float32).tiny
"""Smallest normal fp32 number; with a smaller eps an optimizer could compute 0 / 0."""


def decayed(model: nn.Module, weight_decay: float, leave_out: Collection[Tensor] = ()) -> list[dict]:
    """Returns two parameter groups: with weight decay (matrices, kernels) and without (norms, biases, embeddings).

    A weight shared by an embedding and the head counts as an embedding. Frozen parameters and those in `leave_out` are
    in neither group; an empty group is omitted.
    """
    # By identity, because `==` of tensors compares their values.
    tables, absent = {id(m.weight) for m in embeddings(model)}, {id(p) for p in leave_out}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in absent]
    with_decay = [p for p in trained if p.ndim >= 2 and id(p) not in tables]
    without = [p for p in trained if p.ndim < 2 or id(p) in tables]
    groups = [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def decay_per_rate(lr: float, weight_decay: float, decay: str) -> float:
    """Returns the `weight_decay` to give to a PyTorch optimizer, which multiplies it by the learning rate.

    Raises:
        ConfigError: `decay` is neither `coupled` nor `independent`, or `decay` is `independent` and `weight_decay` is
            at least 1.
    """
    if decay not in ("coupled", "independent"):
        raise ConfigError(f"optimizer.decay={decay} is unknown: choose coupled or independent")
    if decay == "coupled":
        return weight_decay
    if not weight_decay < 1:
        raise ConfigError(
            f"optimizer.weight_decay={weight_decay} is not below 1: with optimizer.decay=independent one step would "
            "decay weights to 0 or beyond; 1e-4 is customary"
        )
    return weight_decay / lr


def check_rates(lr: float, weight_decay: float) -> None:
    """Raises ConfigError if the learning rate or the weight decay is out of bounds."""
    if not 0 < lr < float("inf"):
        raise ConfigError(f"optimizer.lr={lr} is not a finite number above 0: adamw's default is 3e-3")
    if not 0 <= weight_decay < float("inf"):
        raise ConfigError(f"optimizer.weight_decay={weight_decay} is outside [0, inf): use 0 for no weight decay")


def check_moments(betas: Sequence[float], eps: float) -> None:
    """Raises ConfigError if Adam's betas or eps are out of bounds."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optimizer.betas={list(betas)} are not two numbers in [0, 1): [0.9, 0.95] is customary")
    if not SMALLEST_EPS <= eps <= 1:
        raise ConfigError(
            f"optimizer.eps={eps} is outside [{SMALLEST_EPS:.3g}, 1]: below fp32's smallest normal number the update "
            "could divide by 0, above 1 it would ignore the second moment; 1e-8 is customary"
        )


def check_momentum(momentum: float, nesterov: bool, customary: float) -> None:
    """Raises ConfigError if the momentum is out of bounds, or if Nesterov momentum has none."""
    if not 0 <= momentum < 1:
        raise ConfigError(f"optimizer.momentum={momentum} is outside [0, 1): {customary} is customary")
    if nesterov and not momentum:
        raise ConfigError("optimizer.nesterov=true with optimizer.momentum=0 does nothing: set a momentum")
