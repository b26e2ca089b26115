"""Puts tensors into a model by name, and says which of them did not fit.

    missing      the model has it, the source does not
    surplus      the source has it, the model does not
    misfit       both have it, but shape or kind of number differ

Values are copied into the model's own tensors, so dtype, device and memory format are the model's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names that torch.compile, FSDP and activation checkpointing put into the names of parameters, at any place."""

DDP_PREFIX = "module."
"""Prefix that DistributedDataParallel adds to every name."""

NAMES_SHOWN = 3
"""How many tensors a message names; the others are counted."""


@dataclass(frozen=True)
class Fit:
    """How a source's tensors fit a model.

    Attributes:
        fitting: what can be loaded, by the model's names.
        missing, surplus: names.
        misfit: names, each with what differs.
        total: number of the model's tensors.
    """

    fitting: Mapping[str, Any]
    missing: Sequence[str]
    surplus: Sequence[str]
    misfit: Sequence[str]
    total: int

    @property
    def whole(self) -> bool:
        """Whether every tensor of the model is loaded, and none is left over."""
        return not (self.missing or self.surplus or self.misfit)

    def differences(self) -> str:
        """Returns what does not fit, in words: `2 missing (head.weight, head.bias)`; empty if all fits."""
        kinds = (
            (self.missing, "missing from the source"),
            (self.surplus, "not in the model"),
            (self.misfit, "of another shape or type"),
        )
        return "; ".join(f"{len(names)} {words}: {shortened(names)}" for names, words in kinds if names)


def fit(model: nn.Module, given: Mapping[str, Any]) -> Fit:
    """Compares a source's tensors with a model's parameters and persistent buffers.

    Args:
        model: its tensors are not changed.
        given: tensors by name, and other objects that modules save (`get_extra_state`). Prefixes of wrapped models are
            removed from the names if more of them fit without.
    """
    live = model.state_dict()
    given = unwrapped(given, live)
    twins = tied(model, live)
    misfit = {name: why for name in given if name in live and (why := difference(live[name], given[name]))}
    for names in twins:
        values = [name for name in names if name in given and name not in misfit]
        if any(not torch.equal(given[values[0]], given[name]) for name in values[1:]):
            misfit[values[1]] = f"differs from {values[0]}, which is the same tensor in the model"
    alias = {name: names for names in twins for name in names}
    missing = [
        name
        for name, tensor in live.items()
        if isinstance(tensor, Tensor) and name not in given and not any(n in given for n in alias.get(name, ()))
    ]
    return Fit(
        fitting={name: value for name, value in given.items() if name in live and name not in misfit},
        missing=missing,
        surplus=[name for name in given if name not in live],
        misfit=[f"{name} {why}" for name, why in misfit.items()],
        total=sum(isinstance(tensor, Tensor) for tensor in live.values()),
    )


def load_(model: nn.Module, found: Fit) -> None:
    """Copies the fitting tensors into the model; the others keep their values.

    Raises:
        ConfigError: a tensor is not finite. The model is then unchanged.
    """
    bad = [
        name
        for name, value in found.fitting.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all()
    ]
    if bad:
        raise ConfigError(
            f"{len(bad)} of its tensors are not finite: {shortened(bad)}: choose an older, healthy checkpoint"
        )
    model.load_state_dict(dict(found.fitting), strict=False)


def unwrapped(given: Mapping[str, Any], live: Iterable[str]) -> Mapping[str, Any]:
    """Returns the tensors without the prefixes of wrapped models, if more of their names are then in `live`."""
    names, stripped = set(live), {without_wrappers(name): value for name, value in given.items()}
    better = len(stripped) == len(given) and len(stripped.keys() & names) > len(given.keys() & names)
    return stripped if better else given


def without_wrappers(name: str) -> str:
    """Returns `blocks.0.weight` for `module._orig_mod.blocks.0.weight`."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    while name.startswith(DDP_PREFIX):
        name = name.removeprefix(DDP_PREFIX)
    return name


def tied(model: nn.Module, live: Iterable[str]) -> list[list[str]]:
    """Returns the names of each tensor that the model's state dict holds under several names."""
    names: dict[int, list[str]] = {}
    known = set(live)
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if name in known:
            names.setdefault(id(tensor), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def difference(live: Any, given: Any) -> str:
    """Returns why a value cannot be loaded in place of `live`; empty if it can."""
    if not isinstance(live, Tensor) or not isinstance(given, Tensor):
        return "" if isinstance(live, Tensor) == isinstance(given, Tensor) else f"is a {type(given).__name__}"
    if live.shape != given.shape:
        return f"{list(given.shape)} in the source, {list(live.shape)} in the model"
    if kind(live) != kind(given):  # quantised weights, for example, need their scale
        return f"{given.dtype} in the source, {live.dtype} in the model"
    return ""


def kind(tensor: Tensor) -> str:
    """Returns `real`, `complex` or `integer`; dtypes of one kind are converted into each other."""
    return "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "integer"


def shortened(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"
