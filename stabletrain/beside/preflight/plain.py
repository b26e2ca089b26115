"""A loop computed plainly: without compilation, recomputation, autocast or dropout; its losses and its gradients."""

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stabletrain.beside.preflight.loop import Loop, seed
from stabletrain.beside.preflight.recording import parameters_of, replaced, users_line

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

LOWEST = 2.0**-8
"""Loss scale below which no gradient is looked for: fp16 would lose all of a usual one."""

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Recomputed:
    """A call of `checkpoint`.

    Attributes:
        function: what is recomputed in the backward pass.
        preserves: whether with the random state of the forward pass.
        line: of the user's code.
    """

    function: Any
    preserves: bool
    line: str


@contextmanager
def eager() -> Generator[list[Recomputed], None, None]:
    """Runs compiled code as it is written, and checkpointed code without recomputation; yields what had some."""
    found: list[Recomputed] = []

    def kept(_: Any, function: Any, *args: Any, **options: Any) -> Generator[None, None, None]:
        preserves = options["preserve_rng_state"] if "preserve_rng_state" in options else args[0]
        found.append(Recomputed(function, preserves, users_line()))
        yield

    def called(_: Any, function: Any, preserves: bool, *args: Any) -> Any:
        found.append(Recomputed(function, preserves, users_line()))
        return function(*args)

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and it takes seconds to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Models import `checkpoint` by its name, so what it calls is replaced, not the function itself.
        checkpoint = torch.utils.checkpoint
        name = "_checkpoint_without_reentrant_generator"
        name = f"{name}_impl" if hasattr(checkpoint, f"{name}_impl") else name  # from PyTorch 2.14 on
        stack.enter_context(replaced(checkpoint, name, kept))
        stack.enter_context(replaced(checkpoint.CheckpointFunction, "apply", called))
        yield found


@contextmanager
def without_autocast() -> Generator[None, None, None]:
    """Leaves autocast off wherever it is turned on."""

    def enter(inner: Callable[..., Any], context: Any) -> Any:
        enabled, context._enabled = context._enabled, False
        try:
            return inner(context)
        finally:
            context._enabled = enabled

    with replaced(torch.autocast, "__enter__", enter):
        yield


@contextmanager
def without_dropout(model: nn.Module) -> Generator[None, None, None]:
    """Makes dropout return its input."""

    def attention(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(args) > 4:
            return inner(*args[:4], 0.0, *args[5:], **kwargs)
        return inner(*args, **{**kwargs, "dropout_p": 0.0})

    recurrent = [each for each in model.modules() if isinstance(each, nn.RNNBase)]
    rates = [each.dropout for each in recurrent]
    with ExitStack() as stack:
        for name in DROPOUTS:
            stack.enter_context(replaced(F, name, lambda _, input, *args, **kwargs: input))
        stack.enter_context(replaced(F, "scaled_dot_product_attention", attention))
        try:
            for each in recurrent:
                each.dropout = 0.0
            yield
        finally:
            for each, rate in zip(recurrent, rates, strict=True):
                each.dropout = rate


def trained(loop: Loop) -> dict[str, Tensor]:
    """Returns the parameters that the optimizers train, by name, and those of the model that could be."""
    found = {loop.name_of(each): each for optimizer in loop.optimizers for each in parameters_of(optimizer)}
    found |= loop.parameters
    return {name: each for name, each in found.items() if each.requires_grad}


def gradient_of(loop: Loop, batch: Any, number: int = 1) -> tuple[float, Gradients]:
    """Returns the loss of a batch and its gradient; a parameter without gradient is missing.

    Args:
        loop: whose gradients are overwritten.
        batch: of the loop.
        number: seed of the random numbers.
    """
    parameters = trained(loop)
    for each in parameters.values():
        each.grad = None
    seed(number)
    loss = loop.loss(batch)
    # fp16 has no numbers below 6e-8, and none above 65504. The scaler's own scale may be too large at first: then it is
    # lowered as the scaler would do. Compiled code keeps nothing for a second backward pass.
    scale, again = 1.0, False
    if loop.scaler is not None and loop.scaler.is_enabled():
        scale, again = min(loop.scaler.get_scale(), 2.0**10), not loop.compiled
    while True:
        (loss * scale).backward(retain_graph=again)
        gradients = {name: each.grad.detach() / scale for name, each in parameters.items() if each.grad is not None}
        for each in parameters.values():
            each.grad = None
        if not again or scale <= LOWEST or all(bool(each.isfinite().all()) for each in gradients.values()):
            break
        scale /= 16
    return float(loss.detach()), gradients


def norm(gradients: Gradients) -> float:
    """Returns the norm of a gradient."""
    return float(sum(float(each.double().square().sum()) for each in gradients.values()) ** 0.5)


def dot(one: Gradients, two: Gradients) -> float:
    """Returns the product of two gradients; what is missing in one is 0."""
    return float(sum(float((each.double() * two[name].double()).sum()) for name, each in one.items() if name in two))


def cosine(one: Gradients, two: Gradients) -> float:
    """Returns the cosine of two gradients; 0 if one is 0."""
    return dot(one, two) / max(norm(one) * norm(two), 1e-300)


def apart(one: Gradients, two: Gradients) -> dict[str, float]:
    """Returns the norm of the difference of two gradients, for each parameter."""
    found = {}
    for name in {**one, **two}:
        first, second = one.get(name), two.get(name)
        if first is None or second is None:
            known = second if first is None else first
            assert known is not None
            found[name] = float(known.double().norm())
        else:
            found[name] = float((first.double() - second.double()).norm())
    return found


def mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Applies a function to each tensor of a batch: a tensor, or nested tuples, lists and dictionaries of tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: mapped(function, each) for name, each in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(mapped(function, each) for each in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(mapped(function, each) for each in batch)
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch, in their order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(note, batch)
    return found


class InDouble(TorchFunctionMode):
    """Computes in fp64 what the code would turn to a lower precision, or mix with it."""

    LOWER = (torch.float32, torch.float16, torch.bfloat16)
    CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of PyTorch with its arguments in fp64, if one of them is."""
        del types
        if func in self.CASTS:
            return args[0].double()
        args, kwargs = self.raised([*args]), self.raised(kwargs or {})
        name = getattr(func, "__name__", "")
        present = {each.dtype for each in tensors_of([args, kwargs])}
        if torch.float64 in present and not present.isdisjoint(self.LOWER) and not name.endswith("_"):
            args, kwargs = mapped(doubled, args), mapped(doubled, kwargs)
        return func(*args, **kwargs)

    def raised(self, values: Any) -> Any:
        """Replaces the types of lower precision among arguments: `to(torch.float32)`, `dtype=torch.bfloat16`."""
        if isinstance(values, dict):
            return dict(zip(values, self.raised([*values.values()]), strict=True))
        return [torch.float64 if isinstance(each, torch.dtype) and each in self.LOWER else each for each in values]


def doubled(tensor: Tensor) -> Tensor:
    """Returns a tensor in fp64; integers stay."""
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def in_double(loop: Loop) -> Generator[None, None, None]:
    """Turns a loop's weights to fp64, and computes with them in it, plainly."""
    before = torch.get_default_dtype()
    loop.model.double()
    for optimizer in loop.optimizers:
        for each in parameters_of(optimizer):
            each.data = doubled(each.data)
    torch.set_default_dtype(torch.float64)
    try:
        with eager(), without_autocast(), InDouble():
            yield
    finally:
        torch.set_default_dtype(before)
