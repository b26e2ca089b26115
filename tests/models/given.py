"""Models for the tests of the GPT and its layers: a small one, and one on the meta device."""

from typing import Any

import torch
from torch import nn

from stabletrain.models.gpt import GPT
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.softcap import NoSoftcap


def small(**changes: Any) -> GPT:
    """A GPT of 2 layers x 32 with weights large enough for attention to be far from uniform, in evaluation mode."""
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "vocab_size": 29,
        "block_size": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "position": "rope",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": False,
        "tied_head": False,
        "dropout": 0.0,
        "qknorm": NoQKNorm(),
        "softcap": NoSoftcap(),
        "qkclip": NoQKClip(),
    }
    model = GPT(**(values | changes))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(3.0)
    return model.eval()


def meta(**changes: Any) -> GPT:
    with torch.device("meta"):
        return small(**changes)
