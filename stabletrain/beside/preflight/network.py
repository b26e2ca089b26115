"""The model by itself: tied weights that a copy has split, tensors that PyTorch does not see, parts in eval mode."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from stabletrain.beside.preflight.finding import Finding, listed

DISTINCT = 8
"""Two weights are copies only if they have more different values than this: zeros, ones and identities have two."""


def split_ties(model: nn.Module) -> list[Finding]:
    """Finds two trained parameters that were meant to be one: in the same memory, or the one a copy of the other.

    Copies are said to be split only between modules of different classes, such as an embedding and a linear head:
    layers of the same class are often made as copies of each other (`nn.TransformerEncoder` does).
    """
    found, earlier = [], []
    for name, parameter, owners in owned(model):
        tensor = local(parameter)
        if not parameter.requires_grad or tensor.numel() < 2 or tensor.is_meta:
            continue
        for other_name, other, other_owners in earlier:
            if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
                continue
            places, fix = (name, other_name), f"assign the parameter itself, after all copies: {name} = {other_name}"
            if tensor.data_ptr() == other.data_ptr():
                text = f"{name} and {other_name} are two parameters in the same memory: each step updates it twice"
                found.append(Finding("structure", "fault", text, places, fix=fix))
            elif owners.isdisjoint(other_owners) and copies(tensor, other):
                text = f"{name} equals {other_name} in all {tensor.numel()} values and is another parameter: "
                text += "a copy has split tied weights, which training moves apart"
                found.append(Finding("structure", "fault", text, places, fix=fix))
            elif owners == other_owners == {nn.Embedding} and copies(tensor, other):
                text = f"{name} equals {other_name} in all {tensor.numel()} values: training moves them apart"
                found.append(Finding("structure", "note", text, places, fix=f"if they are meant to be one, {fix}"))
        earlier.append((name, tensor, owners))
    return found


def owned(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, set[type]]]:
    """Yields each parameter with its first name and the classes of the modules that have it."""
    owners: dict[int, set[type]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(type(module))
    for name, parameter in model.named_parameters():
        yield name, parameter, owners[id(parameter)]


def local(parameter: Tensor) -> Tensor:
    """Returns a parameter's values on this rank, without its history."""
    to_local = getattr(parameter.detach(), "to_local", None)  # of a tensor that is divided among ranks
    return parameter.detach() if to_local is None else to_local()


def copies(one: Tensor, two: Tensor) -> bool:
    """Whether two matrices have the same values, and values that only a copy can share."""
    if one.ndim < 2:
        return False
    if not torch.equal(one[0], two[0]) or not torch.equal(one, two):  # the first row is cheap and nearly always differs
        return False
    return len(one.flatten()[:4096].unique()) > DISTINCT


def hidden_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns tensors that require gradients and are kept where PyTorch does not see them, by name: `layers[0].weight`.

    They are in plain lists, dictionaries or attributes of the model's modules.
    """
    known = {id(parameter) for parameter in model.parameters()}
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for place, tensor in trainable_in(value, f"{prefix}.{name}".removeprefix(".")):
                    if id(tensor) not in known:
                        known.add(id(tensor))
                        found[place] = tensor
    return found


def trainable_in(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yields the leaf tensors that require gradients in a value of a module's attribute."""
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield name, value
    elif isinstance(value, nn.Module):
        for part, parameter in value.named_parameters():
            if parameter.requires_grad:
                yield f"{name}.{part}", parameter
    elif isinstance(value, (list, tuple, dict)) and depth < 2:  # lists of lists; no deeper, and no cycles
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from trainable_in(each, f"{name}[{key}]", depth + 1)


def in_eval_mode(
    model: nn.Module, evaluating: Sequence[str] | None = None, when: str = "", *, differs: bool = False
) -> list[Finding]:
    """Finds trained parts of a model that are in eval mode and behave differently there.

    Frozen parts in eval mode are meant. A single norm or dropout in eval mode, within a part in training mode, may be
    meant, as is a mode that only the user's own classes read: a note.

    Args:
        model: with its modes.
        evaluating: names of the modules in eval mode; None for those that are now.
        when: in words, for the text.
        differs: whether the loss is known to be another one in training mode.
    """
    modules = dict(model.named_modules())
    if evaluating is None:
        evaluating = [name for name, module in modules.items() if not module.training]
    matters = [name for name in evaluating if mode_matters(modules[name]) and is_trained(name, modules)]
    if not matters:
        return []
    inside = [name for name in matters if name == "" or name.rpartition(".")[0] in evaluating]
    whole = "" in evaluating
    certain = any(differs or is_pytorchs(modules[name]) for name in inside)
    shown = [name for name in inside or matters if name]
    effects = sorted({effect(modules[name]) for name in inside or matters})
    text = f"{'the model' if whole else 'a trained part of the model'} is in eval mode{when}: {', '.join(effects)}"
    text += f" ({listed(shown)})" if shown else ""
    places = (*(("model",) if whole else ()), *shown)
    fix = "call model.train() before each training step, and after each evaluation"
    return [Finding("structure", "fault" if certain else "note", text, places, fix=fix)]


def is_pytorchs(module: nn.Module) -> bool:
    """Whether a module's class is PyTorch's own."""
    return type(module).__module__.startswith("torch.")


def mode_matters(module: nn.Module) -> bool:
    """Whether a module by itself, without its children, behaves differently in eval mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _NormBase):
        return module.track_running_stats
    if is_pytorchs(module):
        dropout = getattr(module, "dropout", 0.0)  # of a recurrent network or an attention
        return isinstance(dropout, float) and dropout > 0
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "training" in code.co_names


def effect(module: nn.Module) -> str:
    """Returns what eval mode does to a module for which it matters."""
    if isinstance(module, _NormBase):
        return "BatchNorm uses its running statistics in place of the batch's"
    if is_pytorchs(module):
        return "dropout does nothing"
    return f"{type(module).__name__}.forward reads self.training"


def is_trained(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module's parameters are trained; for one without any those of the module that it is in."""
    module = modules[name]
    if not any(True for _ in module.parameters()):
        module = modules[name.rpartition(".")[0]]
    return any(parameter.requires_grad for parameter in module.parameters())
