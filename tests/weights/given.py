"""What the tests of exports share: a model as a run would hand it over, and the bits of a state."""

import torch

from tests.models.given import small

GPT2_PARTS = {"position": "learned", "mlp": "gelu_tanh", "norm_eps": 1e-5, "bias": True, "tied_head": True}
"""The arguments of a GPT that make it GPT-2's architecture."""


def gpt2_like(**changes):
    """A small GPT of GPT-2's architecture, with biases and gains that are not what a new model has."""
    model = small(**{**GPT2_PARTS, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def trained(model, *, samples=None, choices=None, tokenizer="bytes"):
    """The model as `stabletrain export` hands it to a format."""
    from stabletrain.beside.export.trained import Trained

    kind = type(model)
    config = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
    return Trained(model.eval(), config, choices or {}, {"run": "abc", "step": "7"}, lambda: samples, "", tokenizer)


def same(one, other):
    """Whether two states have the same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
