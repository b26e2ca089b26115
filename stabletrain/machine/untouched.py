"""Contexts that leave a model untouched: code inside runs or trains it, and afterwards everything is as before."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stabletrain.buffers import buffers_of
from stabletrain.machine.determinism import Generators

CONTAINERS = ("_modules", "_parameters", "_buffers")
"""Attributes in which a module keeps its children and tensors."""

Attributes = list[tuple[nn.Module, dict[str, Any]]]
"""Each module with its attributes. Values that are changed in place are not copied."""


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Generator[None]:
    """A context after which buffers, gradients, attributes of modules and random generators are as before.

    Inside, all gradients are None. Weights are not restored.
    """
    saved, attributes, generators = buffers_of(model).save(), attributes_of(model), Generators.now(device)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        put_back_attributes(attributes)
        saved.put_back()
        generators.set()


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """A context in which a model is in evaluation mode; afterwards each module is back in its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, training in modes:  # some may always be in evaluation mode, such as a frozen BatchNorm
            module.training = training


def attributes_of(model: nn.Module) -> Attributes:
    """Returns the attributes of all modules."""
    return [(module, {**vars(module)}) for module in model.modules()]


def put_back_attributes(attributes: Attributes) -> None:
    """Restores the attributes of modules, except the containers of their children and tensors."""
    for module, before in attributes:
        live = vars(module)
        for name in [*live]:
            if name not in before:
                del live[name]
        live.update({name: value for name, value in before.items() if name not in CONTAINERS})
