"""Roles of parameters: which module is the head, which parameters have weight decay, and of which kind.

| role | parameters |
|---|---|
| embeddings | weights of embeddings, also if the head or another module shares them |
| head | the weight of the classifier |
| matrices | all others with two or more dimensions: matrices and convolution kernels |
| norms | gains and biases of norms |
| biases | all other biases |
| scalars | the rest: one number for a branch, a channel or a head, such as SkipInit's gain |

A parameter has the first role that fits. Those whose role is in `optimizer.no_decay` have no weight decay; by default
only matrices and the head have it. Weight decay has three kinds, with f the factor of warmup and schedule (and of a
rollback that lowers the learning rate for some steps):

    coupled:      w <- w - lr f decay w      PyTorch's: the peak learning rate changes the strength of the decay
    independent:  w <- w - f decay w         Loshchilov and Hutter, arXiv 1711.05101; arXiv 2309.14322 compares learning
                                             rates with this form (section 3.2.2)
    corrected:    w <- w - lr f^2 decay w    AdamC (Defazio, arXiv 2506.02285); only matrices, all else is coupled

With a norm behind it, a layer's weights settle where |g| / |w| is proportional to sqrt(decay / rate). Coupled decay
therefore lets gradients grow while a schedule lowers the rate; `corrected` keeps this ratio. Like the paper, it takes
every layer except the output's for one with a norm behind it; Chou, arXiv 2512.08217, derives the square without norms,
and for any optimizer. With `schedule=constant` and without warmup it equals `coupled`.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError, did_you_mean
from stabletrain.stability.schedule import DECAY_WITH_LR, PEAK_DECAY


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


ROLES = ("embeddings", "head", "matrices", "norms", "biases", "scalars")
"""The names in `optimizer.no_decay`."""

NO_DECAY = ("norms", "biases", "scalars", "embeddings")
"""Roles without weight decay by default."""

DECAY_KINDS = ("coupled", "independent", "corrected")


def roles(model: nn.Module) -> dict[nn.Parameter, str]:
    """Returns the role of each of the model's parameters, in the order of `model.parameters()`.

    Dimensions come first: a norm's gain with two or more dimensions is a matrix.
    """
    tables = {module.weight for module in embeddings(model)}
    head = getattr(classifier(model), "weight", None)
    norms = {p for m in model.modules() if is_norm(m) for p in m.parameters(recurse=False)}

    def role(name: str, parameter: nn.Parameter) -> str:
        if parameter in tables:
            return "embeddings"
        if parameter.ndim >= 2:
            return "head" if parameter is head else "matrices"
        if parameter in norms:
            return "norms"
        return "biases" if "bias" in name.rpartition(".")[2] else "scalars"

    return {parameter: role(name, parameter) for name, parameter in model.named_parameters()}


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: the name of its class says so, as in all of PyTorch and in most models."""
    return "norm" in type(module).__name__.lower()


@dataclass(frozen=True)
class WeightDecay:
    """Which parameters have weight decay, how strong it is, and of which kind.

    Attributes:
        strength: `optimizer.weight_decay`.
        kind: `optimizer.decay`: `coupled`, `independent` or `corrected`.
        without: `optimizer.no_decay`: roles without weight decay.
    """

    strength: float
    kind: str = "coupled"
    without: Sequence[str] = NO_DECAY

    def __post_init__(self) -> None:
        if self.kind not in DECAY_KINDS:
            raise ConfigError(f"optimizer.decay={self.kind} is unknown: choose {' or '.join(DECAY_KINDS)}")
        if self.kind == "independent" and not self.strength < 1:
            raise ConfigError(
                f"optimizer.weight_decay={self.strength} is not below 1: with optimizer.decay=independent one step "
                "would decay weights to 0 or beyond; 1e-4 is customary"
            )
        for name in self.without:
            if name not in ROLES:
                raise ConfigError(
                    f"optimizer.no_decay=[{','.join(self.without)}]: {name} is no role of a parameter"
                    f"{did_you_mean(name, ROLES)}; fix: choose from {', '.join(ROLES)}"
                )

    def groups(self, model: nn.Module, lr: float, leave_out: Collection[Tensor] = ()) -> list[dict[str, Any]]:
        """Returns the parameter groups of the model's trainable parameters for a PyTorch optimizer.

        First those with weight decay, last those without; with `corrected`, the corrected ones before the other ones
        with weight decay. An empty group is omitted.

        Args:
            model: its parameters that are frozen or in `leave_out` are in no group.
            lr: peak learning rate, by which the optimizer multiplies `weight_decay`.
            leave_out: parameters of another optimizer.
        """
        absent = {id(p) for p in leave_out}  # by identity, because `==` of tensors compares their values
        groups: dict[bool | None, list[nn.Parameter]] = {True: [], False: [], None: []}
        for parameter, role in roles(model).items():
            if parameter.requires_grad and id(parameter) not in absent:
                groups[self.is_corrected(role)].append(parameter)
        found = [
            {"params": parameters, **self.options(is_corrected, lr)} for is_corrected, parameters in groups.items()
        ]
        return [group for group in found if group["params"]]

    def is_corrected(self, role: str) -> bool | None:
        """Returns whether the weight decay of a role is corrected; None if it has none."""
        return None if role in self.without else self.kind == "corrected" and role == "matrices"

    def options(self, is_corrected: bool | None, lr: float) -> dict[str, Any]:
        """Returns the options of a group: `weight_decay`, and what makes the step correct it.

        Args:
            is_corrected: see `is_corrected`.
            lr: peak learning rate.
        """
        if is_corrected is None:
            return {"weight_decay": 0.0}
        per_rate = self.strength / lr if self.kind == "independent" else self.strength
        return {"weight_decay": per_rate} | ({DECAY_WITH_LR: True, PEAK_DECAY: per_rate} if is_corrected else {})


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
