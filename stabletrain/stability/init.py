"""Initialisation: the scale of the first weights, on which the scale of every later activation rests.

A kind of init is called once with a model whose parameters its constructor has filled, and rewrites them in place from
PyTorch's global generator, in the order of `model.modules()`: the same seed gives the same weights. It writes linear
layers, convolutions and embeddings. Norms keep their gain, biases become 0, an embedding's padding row stays 0.

A model tells by two methods where its residual branches end: `residual_projections()` lists the `nn.Linear` whose
output is added to the residual stream, `residual_gains()` the parameters that multiply the end of a branch.
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
"""Standard deviations, of the normal before it is truncated, at which `fan_in` truncates it."""

REMAINS = math.sqrt(
    1 - math.sqrt(2 / math.pi) * TRUNCATION * math.exp(-(TRUNCATION**2) / 2) / math.erf(TRUNCATION / math.sqrt(2))
)
"""Standard deviation of the unit normal once truncated: 0.8796."""

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""The kinds whose weight is `[out, fan-in ...]`."""


@dataclass(frozen=True)
class TorchInit:
    """The weights stay as the model's constructor made them."""

    def __call__(self, model: nn.Module) -> None:
        """Nothing changes and no random number is drawn."""
        del model


@dataclass(frozen=True)
class GPT2Init:
    """GPT-2's: weights N(0, std), biases 0, residual projections N(0, std / sqrt(N)).

    N is the number of residual projections, two for each of L blocks: their sum then starts with the variance of one,
    whatever the depth. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section
    2.3; the 0.02 is from GPT, Radford et al. 2018.

    Attributes:
        std: standard deviation of every weight but those of the residual projections.
    """

    std: float

    def __post_init__(self) -> None:
        check_std(self.std, "GPT-2")

    def __call__(self, model: nn.Module) -> None:
        """Rewrites `model`.

        Raises:
            ConfigError: the model lists no residual projections.
        """
        residual = projections(model, "gpt2")
        for module in written(model, "gpt2"):
            fill(module, self.std / len(residual) ** 0.5 if module in residual else self.std)


@dataclass(frozen=True)
class NormalInit:
    """OLMo 2's (arXiv 2501.00656): every weight N(0, std), whatever its shape and depth; biases 0.

    Every block adds the same variance to the residual stream, which so grows with the root of the depth.

    Attributes:
        std: standard deviation of every weight; 0.02 there.
    """

    std: float

    def __post_init__(self) -> None:
        check_std(self.std, "OLMo 2")

    def __call__(self, model: nn.Module) -> None:
        """Rewrites `model`.

        Raises:
            ConfigError: the model has no layer that an init writes.
        """
        for module in written(model, "normal"):
            fill(module, self.std)


@dataclass(frozen=True)
class FanInInit:
    """The small-scale proxies': weights of standard deviation 1 / sqrt(fan-in), embeddings N(0, 1 / sqrt(width)).

    The fan-in is the number of values that one output sums over, a kernel's pixels included; so every layer maps unit
    variance to unit variance. The normal is truncated at 2 of its standard deviations and scaled up so that what
    remains has the standard deviation above, as JAX's `variance_scaling` does. Embeddings are not truncated. Source:
    arXiv 2309.14322, section 2.1.
    """

    def __call__(self, model: nn.Module) -> None:
        """Rewrites `model`.

        Raises:
            ConfigError: the model has no layer that an init writes.
        """
        for module in written(model, "fan_in"):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                fill(module, module.embedding_dim**-0.5)
            else:
                fill(module, module.weight[0].numel() ** -0.5, truncated=True)


@dataclass(frozen=True)
class SmallInit:
    """Small sub-layers and a large shortcut: weights N(0, sqrt(2 / (5 d))), residual projections / sqrt(N) on top.

    d is the width of the embeddings, N the number of residual projections. Embeddings are N(0, 1): a token then
    enters with an RMS of 1, which bounds the gradient that the first norm passes back. The paper multiplies embeddings
    in the forward pass or normalises them; the models here do neither, so the init gives the embeddings that scale
    themselves. Learned positions are small, as other weights. The head is one of the sub-layers, so it must not be the
    embeddings' matrix: logits would start with a standard deviation of sqrt(d). Sources: Takase et al., arXiv
    2312.16903; the standard deviation from Nguyen and Salazar, arXiv 1910.05895.
    """

    def __call__(self, model: nn.Module) -> None:
        """Rewrites `model`, whose first embedding in the order of `model.modules()` is that of the tokens.

        Raises:
            ConfigError: the model has no embedding, lists no residual projections, or its head is tied.
        """
        residual = projections(model, "small")
        tokens = next((m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)), None)
        if tokens is None:
            raise ConfigError(
                f"init=small takes its scale from the width of the embeddings, and {type(model).__name__} has none: "
                "use init=normal or init=fan_in"
            )
        head = classifier(model)
        if head is tokens or getattr(head, "weight", None) is tokens.weight:
            raise ConfigError(
                "init=small gives embeddings a standard deviation of 1, and a tied head would turn them into logits "
                f"of some {tokens.embedding_dim**0.5:.0f}: use model.tied_head=false, or init=gpt2"
            )
        std = math.sqrt(2 / (5 * tokens.embedding_dim))
        for module in written(model, "small"):
            fill(module, 1.0 if module is tokens else std / len(residual) ** 0.5 if module in residual else std)


@dataclass(frozen=True)
class ZeroResidualInit:
    """Residual branches that start by adding nothing, so that a network of any depth starts as its shortcuts.

    Where a model lists residual projections, these are 0 and every other weight is N(0, 0.02), as in GPT-2 (Fixup,
    arXiv 1901.09321, zeroes the last layer of a branch; ReZero, arXiv 2003.04887, a factor of it). Where it lists
    residual gains, these are 0 and all else stays as its constructor made it (the last BatchNorm of a block: Goyal et
    al., arXiv 1706.02677, section 5.1). In the first step of a branch only what was zeroed learns.
    """

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        """Rewrites `model`.

        Raises:
            ConfigError: the model lists neither projections nor gains, or nothing that it lists would change.
        """
        residual, gains = listed(model, "residual_projections"), listed(model, "residual_gains")
        if not residual and not gains:
            raise ConfigError(
                f"init=zero_residual silences residual branches, and {type(model).__name__} names none: use "
                "init=torch, or give the model a method residual_projections() or residual_gains() that lists the "
                "nn.Linear, or the parameters, which end them"
            )
        if not residual and not any(gain.any() for gain in gains):
            raise ConfigError(
                f"init=zero_residual does nothing: the residual gains of {type(model).__name__} are 0 already; "
                "use init=torch"
            )
        for module in written(model, "zero_residual") if residual else []:
            fill(module, 0.0 if module in residual else GPT2_STD)
        for gain in gains:
            gain.zero_()


def check_std(std: float, whose: str) -> None:
    """Refuses a standard deviation that is not above 0, or not finite."""
    if not 0 < std < math.inf:
        raise ConfigError(f"init.std={std} is outside (0, inf): weights must differ and be finite; {whose} uses 0.02")


def listed(model: nn.Module, method: str) -> list:
    """What `model.<method>()` lists; nothing where it has no such method."""
    return list(getattr(model, method, list)())


def projections(model: nn.Module, init: str) -> set[nn.Module]:
    """The model's residual projections.

    Raises:
        ConfigError: it lists none.
    """
    if found := listed(model, "residual_projections"):
        return set(found)
    raise ConfigError(
        f"init={init} scales the residual projections, and {type(model).__name__} names none: use init=torch, "
        "or give the model a method residual_projections() that lists the nn.Linear which end its residual "
        "branches"
    )


def written(model: nn.Module, init: str) -> list:
    """The linear layers, convolutions and embeddings of `model`, in its order.

    Raises:
        ConfigError: there are none, or the weight of one is computed from others (a parametrisation).
    """
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, Layer | nn.Embedding | nn.EmbeddingBag)]
    for name, module in found:
        if not isinstance(getattr(module, "weight", None), nn.Parameter):
            raise ConfigError(
                f"init={init}: the weight of {name} is no parameter but computed from some (weight or spectral norm), "
                "so it cannot be rewritten: use init=torch"
            )
    if found:
        return [module for _, module in found]
    raise ConfigError(
        f"init={init} writes linear layers, convolutions and embeddings, and {type(model).__name__} has none: "
        "use init=torch"
    )


@torch.no_grad()
def fill(module: nn.Module, std: float, truncated: bool = False) -> None:
    """Rewrites the weight of `module` from N(0, std), or from the truncated normal of that std; its bias becomes 0."""
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    if truncated:
        bound = TRUNCATION * std / REMAINS
        nn.init.trunc_normal_(weight, std=std / REMAINS, a=-bound, b=bound)
    else:
        weight.normal_(0.0, std)
    if bias is not None:
        bias.zero_()
    if (row := getattr(module, "padding_idx", None)) is not None:
        weight[row].zero_()
