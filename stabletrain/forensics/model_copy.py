"""Copies of a live model, and of its precision, on which a step runs again without touching the live ones."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.checkpoint.capture import Stateful
from stabletrain.checkpoint.tree import map_tensors
from stabletrain.machine.compiling import compiled_shape
from stabletrain.machine.untouched import CONTAINERS
from stabletrain.stability.precision.base import FullPrecision


def copy_of_model(model: nn.Module) -> nn.Module:
    """A deep copy of a trained model: uncompiled, without gradients, with its parameters' hooks.

    Tensors that a forward pass left in attributes are copied without their graphs. Attributes that cannot be copied (a
    lock, an open file) are shared.
    """
    graphs: dict[int, Any] = {}

    def cut_off(tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            graphs[id(tensor)] = tensor.detach().clone()

    for module in model.modules():
        map_tensors(cut_off, vars(module))
    try:
        model_copy = copy.deepcopy(model, dict(graphs))
    except Exception:  # an attribute that cannot be copied may raise anything
        model_copy = copy.deepcopy(model, uncopyable_attributes(model, graphs) | graphs)
    for mine, live in zip(model_copy.parameters(), model.parameters(), strict=True):
        mine.grad = None
        for hook in (live._backward_hooks or {}).values():
            mine.register_hook(hook)
        for hook in (getattr(live, "_post_accumulate_grad_hooks", None) or {}).values():
            mine.register_post_accumulate_grad_hook(hook)
    return model_copy


def uncopyable_attributes(model: nn.Module, copied: Mapping[int, Any]) -> dict[int, Any]:
    """The attributes of a model's modules that cannot be copied, by `id`."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name in CONTAINERS:
                continue
            try:
                copy.deepcopy(value, dict(copied))
            except Exception:
                found[id(value)] = value
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled by anything except `machine/compiling.py`."""
    code = getattr(module, "_compiled_call_impl", None)
    return (code is not None and compiled_shape(module) is None) or hasattr(module, "_orig_mod")


def with_loss_scale(precision: FullPrecision, loss_scale: float) -> FullPrecision:
    """A copy of a precision at a given loss scale; without a loss scale, an unchanged copy."""
    then = copy.copy(precision)
    if isinstance(then, Stateful) and is_scaled(precision):
        then.load_state_dict({**then.state_dict(), "scale": torch.tensor(loss_scale, dtype=torch.float32)})
    return then


def is_scaled(precision: FullPrecision) -> bool:
    """Whether a precision has a dynamic loss scale."""
    return isinstance(precision, Stateful) and "scale" in precision.state_dict()
