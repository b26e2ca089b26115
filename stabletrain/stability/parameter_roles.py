"""Which part of a model plays which role: the rules that several knobs share, so that they agree.

A model may name its parts itself, by a method; the fallback is what most models look like.
"""

import inspect

from torch import nn


def classifier(model: nn.Module) -> nn.Module | None:
    """The module whose own weight makes the logits: `model.classifier()`, else the last `nn.Linear`, else None.

    A GPT whose head is tied answers with its embedding.
    """
    named = getattr(model, "classifier", None)
    module = isinstance(named, nn.Module)
    if callable(named) and not module and not inspect.signature(named).parameters:  # it may be a forward pass
        return named()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linears[-1] if linears else None


def embeddings(model: nn.Module) -> list[nn.Module]:
    """Every embedding table of the model."""
    return [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
