"""Initialisation: the scale of the initial weights, which determines the scale of all activations.

A kind of init is called once with a newly constructed model and rewrites its parameters in place. It draws from
PyTorch's global generator in the order of `model.modules()`, so the same seed gives the same weights. It writes linear
layers, convolutions and embeddings. Norms keep their gains, biases become 0, an embedding's padding row becomes 0.

A model declares the ends of its residual branches with two methods. `residual_projections()` lists the `nn.Linear`
whose output is added to the residual stream, without a norm between; `residual_gains()` lists the parameters that
multiply the end of a branch.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.stability.parameter_roles import classifier

GPT2_STD = 0.02
"""Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", section 4.1."""

TRUNCATION = 2.0
"""Bound of `fan_in`'s truncated normal, in standard deviations of the normal before truncation."""

STD_AFTER_TRUNCATION = math.sqrt(
    1 - math.sqrt(2 / math.pi) * TRUNCATION * math.exp(-(TRUNCATION**2) / 2) / math.erf(TRUNCATION / math.sqrt(2))
)
"""Standard deviation of the unit normal after truncation: 0.8796."""

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""Layers whose weight has shape `[out, fan-in ...]`."""


@dataclass(frozen=True)
class TorchInit:
    """Keeps the weights that the model's constructor has set. Base class of all kinds, and what each must offer."""

    def __call__(self, model: nn.Module) -> None:
        """Rewrites the parameters of a new model in place. This one does nothing and draws no random numbers."""


@dataclass(frozen=True)
class GPT2Init(TorchInit):
    """GPT-2's init: weights N(0, std), biases 0, residual projections N(0, std / sqrt(N)).

    N is the number of residual projections, two per block. At any depth, the variance of their sum then equals that of
    a single projection without the factor. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask
    Learners", section 2.3; the 0.02 is from GPT, Radford et al. 2018.

    Attributes:
        std: standard deviation of all weights except residual projections.
    """

    std: float

    def __post_init__(self) -> None:
        check_std(self.std, "GPT-2")

    def __call__(self, model: nn.Module) -> None:
        """Initialises `model` in place.

        Raises:
            ConfigError: the model lists no residual projections.
        """
        residual = projections(model, "gpt2")
        for module in layers_to_write(model, "gpt2"):
            fill(module, self.std / len(residual) ** 0.5 if module in residual else self.std)


@dataclass(frozen=True)
class NormalInit(TorchInit):
    """OLMo 2's init (arXiv 2501.00656): every weight N(0, std), whatever its shape and depth; biases 0.

    Every block adds the same variance to the residual stream, so its standard deviation grows with the square root of
    the depth.

    Attributes:
        std: standard deviation of every weight; 0.02 in OLMo 2.
    """

    std: float

    def __post_init__(self) -> None:
        check_std(self.std, "OLMo 2")

    def __call__(self, model: nn.Module) -> None:
        """Initialises `model` in place.

        Raises:
            ConfigError: the model has no layer that an init writes.
        """
        for module in layers_to_write(model, "normal"):
            fill(module, self.std)


@dataclass(frozen=True)
class FanInInit(TorchInit):
    """Weights N(0, 1 / sqrt(fan-in)), truncated; embeddings N(0, 1 / sqrt(width)) (arXiv 2309.14322, section 2.1).

    The fan-in is the number of values that one output sums over, including a kernel's pixels. Every layer then maps
    unit variance to unit variance. The normal is truncated at 2 of its standard deviations and rescaled to the standard
    deviation above, as in JAX's `variance_scaling`. Embeddings are not truncated.
    """

    def __call__(self, model: nn.Module) -> None:
        """Initialises `model` in place.

        Raises:
            ConfigError: the model has no layer that an init writes.
        """
        for module in layers_to_write(model, "fan_in"):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                fill(module, module.embedding_dim**-0.5)
            else:
                fill(module, module.weight[0].numel() ** -0.5, truncated=True)


@dataclass(frozen=True)
class SmallInit(TorchInit):
    """Small sub-layers, large shortcut: weights N(0, s), residual projections N(0, s / sqrt(N)), embeddings N(0, 1).

    s = sqrt(2 / (5 d)), d is the width of the embeddings and N the number of residual projections. Token embeddings
    with an RMS of 1 bound the gradient that the first norm passes back. The paper scales or normalises embeddings in
    the forward pass; the models here do not, so the init sets the scale of the embeddings. Learned positions are small,
    like other weights. The head must not be tied: the logits would start with a standard deviation of sqrt(d). Sources:
    Takase et al., arXiv 2312.16903; s is from Nguyen and Salazar, arXiv 1910.05895.
    """

    def __call__(self, model: nn.Module) -> None:
        """Initialises `model` in place; its first embedding in `model.modules()` must be the token embedding.

        Raises:
            ConfigError: the model has no embedding, lists no residual projections, or its head is tied.
        """
        residual = projections(model, "small")
        tokens = next((m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)), None)
        if tokens is None:
            raise ConfigError(
                f"init=small computes its scale from the width of the embeddings, but {type(model).__name__} has no "
                "embedding: use init=normal or init=fan_in"
            )
        head = classifier(model)
        if head is tokens or getattr(head, "weight", None) is tokens.weight:
            raise ConfigError(
                "init=small gives embeddings a standard deviation of 1; with a tied head that of the logits would be "
                f"about {tokens.embedding_dim**0.5:.0f}: use model.tied_head=false, or init=gpt2"
            )
        std = math.sqrt(2 / (5 * tokens.embedding_dim))
        for module in layers_to_write(model, "small"):
            fill(module, 1.0 if module is tokens else std / len(residual) ** 0.5 if module in residual else std)


@dataclass(frozen=True)
class ZeroResidualInit(TorchInit):
    """Residual branches that output 0 at the start, so that a network of any depth starts as its shortcuts.

    If a model lists residual projections, these are 0 and every other weight is N(0, 0.02), as in GPT-2. Fixup (arXiv
    1901.09321) sets the last layer of a branch to 0, ReZero (arXiv 2003.04887) a factor of the branch. If a model lists
    residual gains, these are 0 and everything else stays as constructed: for the last BatchNorm of a block, see Goyal
    et al., arXiv 1706.02677, section 5.1. In the first step only the zeroed parameters of a branch get a gradient.
    """

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        """Initialises `model` in place.

        Raises:
            ConfigError: the model lists neither projections nor gains, or all the gains it lists are 0 already.
        """
        residual, gains = listed(model, "residual_projections"), listed(model, "residual_gains")
        if not residual and not gains:
            raise ConfigError(
                f"init=zero_residual sets the ends of residual branches to 0, but {type(model).__name__} lists none: "
                "use init=torch, or give the model a method residual_projections() or residual_gains() that lists the "
                "nn.Linear modules or the parameters at the end of each branch"
            )
        if not residual and not any(gain.any() for gain in gains):
            raise ConfigError(
                f"init=zero_residual does nothing: the residual gains of {type(model).__name__} are 0 already; "
                "use init=torch"
            )
        for module in layers_to_write(model, "zero_residual") if residual else []:
            fill(module, 0.0 if module in residual else GPT2_STD)
        for gain in gains:
            gain.zero_()


def check_std(std: float, whose: str) -> None:
    """Raises ConfigError unless `std` is finite and above 0."""
    if not 0 < std < math.inf:
        raise ConfigError(f"init.std={std} is outside (0, inf): weights must differ and be finite; {whose} uses 0.02")


def listed(model: nn.Module, method: str) -> list:
    """Returns the list from `model.<method>()`; empty if the model has no such method."""
    return list(getattr(model, method, list)())


def projections(model: nn.Module, init: str) -> set[nn.Module]:
    """Returns the model's residual projections; an empty list says that norms follow them, so none is to be scaled.

    Raises:
        ConfigError: the model has no such list.
    """
    if callable(getattr(model, "residual_projections", None)):
        return set(listed(model, "residual_projections"))
    raise ConfigError(
        f"init={init} scales the residual projections, but {type(model).__name__} lists none: use init=torch, "
        "or give the model a method residual_projections() that lists the nn.Linear modules at the end of its residual "
        "branches"
    )


def layers_to_write(model: nn.Module, init: str) -> list:
    """Returns the linear layers, convolutions and embeddings of `model`, in the order of `model.modules()`.

    Raises:
        ConfigError: there are none, or a weight is computed from other parameters (a parametrisation).
    """
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, Layer | nn.Embedding | nn.EmbeddingBag)]
    for name, module in found:
        if not isinstance(getattr(module, "weight", None), nn.Parameter):
            raise ConfigError(
                f"init={init}: the weight of {name} is computed from other parameters (weight or spectral norm), so it "
                "cannot be initialised: use init=torch"
            )
    if found:
        return [module for _, module in found]
    raise ConfigError(
        f"init={init} initialises linear layers, convolutions and embeddings, but {type(model).__name__} has none: "
        "use init=torch"
    )


@torch.no_grad()
def fill(module: nn.Module, std: float, truncated: bool = False) -> None:
    """Draws the weight of `module` from N(0, std), or from a truncated normal of that std; sets its bias to 0."""
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    if truncated:
        bound = TRUNCATION * std / STD_AFTER_TRUNCATION
        nn.init.trunc_normal_(weight, std=std / STD_AFTER_TRUNCATION, a=-bound, b=bound)
    else:
        weight.normal_(0.0, std)
    if bias is not None:
        bias.zero_()
    # PyTorch gives the padding row no gradient: what is written here would stay.
    if (row := getattr(module, "padding_idx", None)) is not None:
        weight[row].zero_()
