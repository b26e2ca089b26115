"""Initialisation: the scale of the first weights, on which the scale of every later activation rests.

A kind of init is called once with a model whose parameters its constructor has filled, and rewrites them in place from
PyTorch's global generator, in the order of `model.modules()`: the same seed gives the same weights.
"""

from dataclasses import dataclass

import torch
from torch import nn

from stabletrain.errors import ConfigError


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
    whatever the depth. Norms keep their gain of 1. Source: Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners", section 2.3; the 0.02 is from GPT, Radford et al. 2018.

    Attributes:
        std: standard deviation of every `nn.Linear` and `nn.Embedding`.
    """

    std: float

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ConfigError(f"init.std={self.std} is not above 0: all weights would be equal; GPT-2 uses 0.02")

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        """Rewrites the linear layers and embeddings of `model`.

        Args:
            model: has a method `residual_projections()` that lists the `nn.Linear` whose output is added to the
                residual stream.

        Raises:
            ConfigError: the model has no such method, or it lists nothing.
        """
        listed = getattr(model, "residual_projections", list)()
        if not listed:
            raise ConfigError(
                f"init=gpt2 scales the residual projections, and {type(model).__name__} names none: use init=torch, "
                "or give the model a method residual_projections() that lists the nn.Linear which end its residual "
                "branches"
            )
        residual = set(listed)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, self.std / len(residual) ** 0.5 if module in residual else self.std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
