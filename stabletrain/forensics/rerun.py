"""Runs a step again, unchanged or with one thing changed: what both kinds of subject share.

| variant | what is changed | what the result shows |
|---|---|---|
| same | nothing | not bitwise equal: a hardware fault, or a nondeterministic operation |
| fp32 | no autocast, no loss scale, no TF32, parameters in fp32 | finite: range or precision of a format is to blame |
| fresh_batch | another batch | finite: this batch is to blame |
| older_state | weights and buffers of an earlier step | finite: the updates since then are to blame |

A step of the trainer runs again on a copy of the model (`copy_of_model`, `replay.py`). A step of a user's own loop runs
again by calling the user's closures on the live model (`guard/rerun.py`).
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stabletrain.checkpoint.capture import Stateful
from stabletrain.checkpoint.tree import map_tensors
from stabletrain.errors import StabletrainError
from stabletrain.forensics.agreement import NotInvestigated
from stabletrain.forensics.facts import Outcome
from stabletrain.machine.compiling import compiled_shape
from stabletrain.machine.untouched import CONTAINERS
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.precision.kernels import ieee_kernels

VARIANTS = ("same", "fp32", "fresh_batch", "older_state")
"""The variants, in the order in which they run until the deadline; but a compiled one runs last."""


Watch = Callable[[nn.Module], contextlib.AbstractContextManager]
"""Returns a context around forward and backward of a model, such as a trace."""


class NotPossible(StabletrainError):
    """Raised if something is missing that the variant needs."""


class RerunResult(NamedTuple):
    """The result of running a step again.

    Attributes:
        loss: mean over the step.
        grad_norm: of the unscaled gradients, before clipping; NaN if there was no backward pass.
        gradients: of the parameters, in order; None for those without.
    """

    loss: float
    grad_norm: float
    gradients: Sequence[Tensor | None]


def outcome_of(run: Callable[[], RerunResult], deadline: float) -> Outcome:
    """Runs a step again until it is too late to begin; never raises because of the model.

    Args:
        deadline: in `time.monotonic()` seconds.

    Raises:
        NotInvestigated: all ranks have agreed to stop.
    """
    began = time.monotonic()
    if began >= deadline:
        return Outcome(not_run="the time limit was reached")
    try:
        found = run()
        zeros = zero_share(found.gradients)
    except NotInvestigated:
        raise
    except NotPossible as error:
        return Outcome(not_run=str(error))
    except Exception as error:  # a user's model may raise anything, and an investigation must not end the run
        return Outcome(not_run=" ".join(f"{type(error).__name__}: {error}".split())[:200])
    finite = math.isfinite(found.loss) and math.isfinite(found.grad_norm)
    return Outcome(finite, found.loss, found.grad_norm, None, zeros, time.monotonic() - began)


def zero_share(gradients: Sequence[Tensor | None]) -> float:
    """Returns the share of gradient elements that are exactly 0, in [0, 1]."""
    found = [gradient for gradient in gradients if gradient is not None]
    found = [each.to_local() if hasattr(each, "to_local") else each for each in found]  # ty: ignore[not-callable]
    dense = [each.coalesce().values() if each.layout != torch.strided else each for each in found]
    zeros = sum(int((each == 0).sum()) for each in dense)
    return zeros / max(sum(each.numel() for each in dense), 1)


@contextlib.contextmanager
def in_true_fp32(model: nn.Module) -> Generator[None]:
    """A context without autocast and TF32, in which fp16 and bf16 parameters and buffers are fp32."""
    narrow = (torch.float16, torch.bfloat16)
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.dtype in narrow and not hasattr(t, "to_local")]
    own = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        with ieee_kernels(), without_autocast():
            yield
    finally:
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data


@contextlib.contextmanager
def without_autocast() -> Generator[None]:
    """A context in which every `torch.autocast`, also one that the user's code enters, does nothing."""
    enter = torch.autocast.__enter__

    def disabled(context: Any) -> Any:
        context._enabled, wanted = False, context._enabled
        try:
            return enter(context)
        finally:
            context._enabled = wanted

    torch.autocast.__enter__ = disabled  # ty: ignore[invalid-assignment]
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):  # one that is entered already
            yield
    finally:
        torch.autocast.__enter__ = enter


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
