"""Autocast modes without a loss scale: fp32, TF32 and bf16; and modules that stay in fp32.

TF32 keeps fp32's range and rounds the factors of a product to 10 bits. It is set explicitly, because PyTorch enables it
for convolutions and not for matmul, and because a sweep prepares several modes in one process.

fp32 modules: chosen modules compute in fp32 while the rest of the model runs under autocast. fp16 ends at 65504. Two
parts of a transformer exceed that first: the logits of the head, and attention scores that are computed explicitly.
(PyTorch's fused attention keeps its scores in fp32 already.) On a card without bf16 these belong in fp32, as large sums
do (Micikevicius et al., section 3.3).

The class of an fp32 module is replaced by a subclass of the same name, whose forward disables autocast and casts inputs
to fp32. The module keeps its parameters, hooks and names, and can be copied and compiled. (A forward set on the
instance would not work: the copy's forward would use the original's weights.)
"""

import contextlib
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.records import GradNorms, LossTerms


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


def set_kernels(tf32: bool) -> None:
    """Sets the format of every fp32 matmul, convolution and RNN of the process, on CUDA and in oneDNN.

    fp16's partial sums stay fp32 in every mode: added up in fp16, which PyTorch permits cuBLAS, they overflow where
    the product itself would not.
    """
    from torch.backends import cuda, cudnn, mkldnn

    on_card: list[Any] = [cuda.matmul, cudnn.conv, cudnn.rnn]  # ty: ignore[missing-attribute]
    for operation in on_card:
        operation.fp32_precision = "tf32" if tf32 else "ieee"
    in_onednn: list[Any] = [mkldnn.matmul, mkldnn.conv, mkldnn.rnn]  # ty: ignore[missing-attribute]
    for operation in in_onednn:
        operation.fp32_precision = "ieee"  # what oneDNN calls tf32 is not the cards' format
    cuda.matmul.allow_fp16_reduced_precision_reduction = False


@dataclass
class Unscaled:
    """Every mode but fp16.

    Attributes:
        name: the mode.
        device: where the model lives.
        dtype: what autocast computes in; float32 means no autocast.
        tf32: whether fp32 matmuls and convolutions may round to TF32.
        why: one line for people, where the mode was chosen for them or is slow here.
        fp32_modules: patterns of module names that compute in fp32.
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
        """Sets the process's switches; call before the first step."""
        set_kernels(self.tf32)

    def wrap_fp32_modules(self, model: nn.Module) -> list[str]:
        """Has the modules that `fp32_modules` names compute in fp32, in place; returns their names.

        Call it once the model is on its device, and before it is compiled.

        Raises:
            ConfigError: a pattern names no module, or one that is never called.
        """
        if self.dtype == torch.float32:
            return []
        return wrap_fp32_modules(model, self.fp32_modules, self.device.type)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Nothing: parameters are fp32, and the optimizer works on them as they are.

        Call it once `wrap_fp32_modules` is done and the optimizer made, before anything is restored or compiled.
        """
        del model, optimizer

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context of forward pass and nothing else."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def scale(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The loss itself."""
        return loss

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Gradients stay as they are."""
        del gradients

    def loss_scale(self) -> Float[Tensor, ""]:
        """1."""
        return torch.ones((), device=self.device)

    def overflow(self, terms: LossTerms, norms: GradNorms) -> Bool[Tensor, ""]:
        """Never: these formats have fp32's range, so a non-finite gradient is no routine."""
        del terms
        return torch.zeros_like(norms.total, dtype=torch.bool)

    def update(self, overflow: Bool[Tensor, ""], applied: Bool[Tensor, ""]) -> None:
        """Nothing to calibrate."""
        del overflow, applied

    def state_dict(self) -> dict:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Nothing."""
        del state
