"""Modules in fp32: chosen modules compute in fp32 while the rest of the model runs in autocast's format.

fp16 ends at 65504. Two places of a transformer pass that long before its training is in trouble: the logits of the
head, and the scores of an attention that is written out. (PyTorch's fused attention keeps its scores in fp32 already.)
On a card without bf16 these belong in fp32, as large sums do (Micikevicius et al., arXiv 1710.03740, section 3.3).

An fp32 module's class is replaced by a subclass of the same name whose forward turns autocast off and widens the
inputs. The module keeps its parameters, its hooks and its names, is copied and compiled as before, and is still an
instance of what it was. (A forward set on the instance would not do: a copy's would compute with the original's
weights.)"""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError


class Fp32Module(nn.Module):
    """What is mixed into the class of a module: its forward with autocast off, on inputs widened to fp32.

    The output stays fp32; operations after it that autocast lists cast it down themselves. Outside of autocast nothing
    changes.
    """

    _autocast_device: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, in fp32."""
        with torch.autocast(self._autocast_device, enabled=False):
            return super().forward(*widen(args), **widen(kwargs))


def widen(value: Any) -> Any:
    """`value` with every fp16 and bf16 tensor in it as fp32, in lists, tuples and dicts too; the rest as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        return {key: widen(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[widen(each) for each in value])
    if isinstance(value, list | tuple):
        return type(value)([widen(each) for each in value])
    return value


@cache
def fp32_class(kind: type[nn.Module], device: str) -> type[nn.Module]:
    """The subclass of `kind` that computes in fp32 under the autocast of `device`; one for all modules of that kind."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (Fp32Module, kind), {**names, "_autocast_device": device})


def wrap_fp32_modules(model: nn.Module, patterns: Sequence[str], device: str) -> list[str]:
    """Makes every module whose name fits one of `patterns` an fp32 module, in place.

    Args:
        model: its parameters must be fp32.
        patterns: of names as `named_modules` gives them, with `*`, `?` and `[...]`; `*` also passes dots.
        device: the type of device whose autocast is turned off.

    Returns:
        The names of these modules, in the model's order.

    Raises:
        ConfigError: a pattern fits no module that is called.
    """
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name and called(module)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ConfigError(f"precision.fp32_modules: {unmatched(model, pattern, [name for name, _ in named])}")
    chosen = [(name, module) for name, module in named if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for _, module in chosen:
        if not isinstance(module, Fp32Module):
            module.__class__ = fp32_class(type(module), device)
    return [name for name, _ in chosen]


def called(module: nn.Module) -> bool:
    """Whether a module has a forward: a list of modules is never called itself."""
    return type(module).forward is not nn.Module.forward


def unmatched(model: nn.Module, pattern: str, names: list[str]) -> str:
    """Why `pattern` fits none of `names`, and what would."""
    general = list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in n.split(".")) for n in names))
    if any(name.startswith(f"{pattern}.") for name, _ in model.named_modules()):
        return f"'{pattern}' only holds other modules and is never called itself; use '{pattern}.*' for those in it"
    near = difflib.get_close_matches(pattern, list(dict.fromkeys([*general, *names])), n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"'{pattern}' names no module of {type(model).__name__}: {hint}Its modules are {', '.join(general)}"


def check_patterns(patterns: Sequence[object]) -> None:
    """Refuses what is not a list of names."""
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(
                f"precision.fp32_modules={list(patterns)}: {pattern!r} is not the name of a module; "
                "write a list such as [head, blocks.*.attention.dot_product]"
            )
