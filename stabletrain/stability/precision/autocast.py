"""Autocast modes without a loss scale (fp32, TF32 and bf16), and modules that stay in fp32.

`fp32_modules` keeps chosen modules in fp32 while the rest of the model runs under autocast. The largest fp16 value is
65504. Two parts of a transformer exceed it first: the logits of the head, and attention scores that are computed
explicitly. (PyTorch's fused attention keeps its scores in fp32 already.) On a card without bf16, keep both in fp32,
and large sums too (Micikevicius et al., arXiv 1710.03740, section 3.3).

An fp32 module keeps its parameters, hooks and names, and can be copied and compiled.
"""

import contextlib
import copy
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.precision.kernels import set_kernels


class Fp32Module(nn.Module):
    """Mixin for a module's class: runs its forward with autocast off, on inputs cast to fp32.

    The output stays fp32; later operations on autocast's list cast it down themselves. Outside of autocast nothing
    changes.
    """

    _autocast_device: str
    in_fp32 = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward in fp32."""
        with torch.autocast(self._autocast_device, enabled=False):
            return super().forward(*widen(args), **widen(kwargs))


def widen(value: Any) -> Any:
    """Casts fp16 and bf16 tensors to fp32, also inside lists, tuples and dicts; leaves everything else unchanged."""
    match value:
        case Tensor():
            return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        case dict() if type(value) is dict:
            return {key: widen(each) for key, each in value.items()}
        case dict():
            widened = copy.copy(value)  # keeps the class: a `defaultdict` cannot be made of a dict
            for key, each in value.items():
                widened[key] = widen(each)
            return widened
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*map(widen, value))
        case tuple() | list():
            return type(value)(map(widen, value))
    return value


@cache
def with_mixin(
    mixin: type[nn.Module], kind: type[nn.Module], device: str, shown: type[nn.Module] | None = None
) -> type[nn.Module]:
    """Returns the class `kind` with the forward of `mixin`, for the autocast of device type `device`.

    It has the name of `shown`, by default of `kind`, so that messages and reports name the user's class.
    """
    shown = shown or kind
    names = {name: getattr(shown, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(shown.__name__, (mixin, kind), {**names, "_autocast_device": device})


def wrap_fp32_modules(model: nn.Module, patterns: Sequence[str], device: str) -> list[str]:
    """Makes every module whose name matches one of `patterns` an fp32 module, in place.

    Args:
        model: a model whose parameters are fp32.
        patterns: patterns of the names in `named_modules`, with `*`, `?` and `[...]`; `*` also matches dots.
        device: the device type for which autocast is disabled.

    Returns:
        The names of these modules, in the model's order.

    Raises:
        ConfigError: a pattern matches no module that has a forward.
    """
    chosen = matching(model, patterns, "fp32_modules")
    for _, module in chosen:
        if not isinstance(module, Fp32Module):
            # Change the class, not `module.forward`: a copied module's forward would still use the original's weights.
            module.__class__ = with_mixin(Fp32Module, type(module), device)
    return [name for name, _ in chosen]


def in_fp32_modules(model: nn.Module) -> set[int]:
    """Returns the ids of the fp32 modules and of all modules in them."""
    return {id(part) for module in model.modules() if isinstance(module, Fp32Module) for part in module.modules()}


def matching(model: nn.Module, patterns: Sequence[str], key: str) -> list[tuple[str, nn.Module]]:
    """Returns the modules whose name matches one of `patterns`, in the model's order.

    Raises:
        ConfigError: a pattern of `precision.<key>` matches no module that has a forward.
    """
    every = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    # An `nn.ModuleList`, for example, has no forward.
    named = [(name, module) for name, module in every if type(module).forward is not nn.Module.forward]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ConfigError(f"precision.{key}: {unmatched(model, pattern, [name for name, _ in named])}")
    return [(name, module) for name, module in named if any(fnmatchcase(name, pattern) for pattern in patterns)]


def unmatched(model: nn.Module, pattern: str, names: list[str]) -> str:
    """Explains why `pattern` matches none of `names`, and suggests names that exist."""
    # Show `blocks.*.mlp` once instead of one name per block.
    general = list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in n.split(".")) for n in names))
    if any(name.startswith(f"{pattern}.") for name, _ in model.named_modules()):
        return f"'{pattern}' only holds other modules and is never called; use '{pattern}.*' for the modules in it"
    near = difflib.get_close_matches(pattern, list(dict.fromkeys([*general, *names])), n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"'{pattern}' names no module of {type(model).__name__}: {hint}its modules are {', '.join(general)}"


CASTING = ("bf16", "fp16")
"""Modes whose autocast casts weights that are stored in fp32."""


def cast_by_autocast(model: nn.Module) -> list[str]:
    """Returns the names of the weights that autocast casts wherever the model uses them.

    These are weights of linear layers and convolutions. Not those in fp32 modules, those that other modules share (a
    tied head), and those of subclasses, which may use them in other ways; unless these have `only_multiplies`.
    """
    wide, kinds = in_fp32_modules(model), (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

    def multiplies(module: nn.Module) -> bool:
        return type(module) in kinds or (isinstance(module, kinds) and hasattr(module, "only_multiplies"))

    uses: dict[int, list[bool]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            weight = name == "weight" and multiplies(module) and id(module) not in wide
            uses.setdefault(id(parameter), []).append(weight)
    return [name for name, each in model.named_parameters() if all(uses[id(each)]) and each.dtype == torch.float32]


def check_patterns(patterns: Sequence[object], key: str = "fp32_modules") -> None:
    """Raises ConfigError unless every pattern is a non-empty string."""
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(
                f"precision.{key}={list(patterns)}: {pattern!r} is not the name of a module; "
                "write a list such as [head, blocks.*.attention.dot_product]"
            )


@dataclass
class Unscaled(FullPrecision):
    """Every mode but fp16.

    Attributes:
        name: the mode.
        device: the model's device.
        dtype: autocast's dtype; float32 means no autocast.
        tf32: whether fp32 matmuls and convolutions may round to TF32.
        why: see `FullPrecision`.
        fp32_modules: name patterns of the modules that compute in fp32.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    tf32: bool = False
    why: str = ""
    fp32_modules: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_patterns(self.fp32_modules)
        if self.fp32_modules and self.dtype == torch.float32:
            idle = "precision.fp32_modules does nothing: every module is fp32"
            self.why = f"{self.why}; {idle}" if self.why else idle

    def prepare(self) -> None:
        """Sets the process-wide arithmetic of PyTorch's kernels."""
        set_kernels(self.tf32)

    def wrap_fp32_modules(self, model: nn.Module) -> list[str]:
        """Makes the modules named by `fp32_modules` compute in fp32, in place; returns their names.

        Raises:
            ConfigError: a pattern matches no module that has a forward.
        """
        if self.dtype == torch.float32:
            return []
        return wrap_fp32_modules(model, self.fp32_modules, self.device.type)

    def casts(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Returns the dtype of each weight that autocast casts wherever the model uses it, by name."""
        return dict.fromkeys(cast_by_autocast(model), self.dtype) if self.name in CASTING else {}

    def autocast(self) -> contextlib.AbstractContextManager:
        """Returns the autocast context; it does nothing if the mode has none."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)
