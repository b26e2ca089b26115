"""Compiled training: `torch.compile`, tried on one batch before the first step, and plain Python where that fails.

A step's bits must follow from its number alone. So compiled code runs training passes over inputs of one shape, the
run's own, and nothing else; every other pass (evaluation, sampling, shorter samples, monitors) is plain Python. Left
to itself PyTorch would compile anew for a second shape, with sizes left open, and what a step computes would depend on
what had been run before it.
"""

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.errors import StabletrainError
from stabletrain.machine.determinism import rng_restored

VARIANTS = 64
"""Forms of one function that PyTorch may compile before it gives up, in silence; a model copied for a replay is one."""


def wanted(compile: str | bool, device: torch.device) -> bool:
    """Whether to try: `auto` does on CUDA. On a CPU the products stay what they are, and compiling takes minutes."""
    return device.type == "cuda" if compile == "auto" else bool(compile)


def inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """PyTorch's own compiler, kept to what gives the same bits each time.

    It would add up the gradients of an embedding and of max-pooling with atomics, in the order in which threads happen
    to come, and choose among kernels by their speed. Here these gradients are summed in order, and nothing is measured.
    What else it scatters (a plug-in's `table[ids]`) is in order with `determinism=strict` only, as in plain Python.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback, require_contiguous

    aten = torch.ops.aten
    unordered = {aten.embedding_dense_backward.default, aten.max_pool2d_with_indices_backward.default}
    for operation in unordered - {*lowerings}:  # where CI is set, PyTorch refuses what nobody announced
        make_fallback(operation, require_contiguous, warn=False, override_decomp=True)
    table = {operation: rule for operation, rule in select_decomp_table().items() if operation not in unordered}
    return compile_fx(graph, inputs, config_patches={"deterministic": True}, decompositions=table)


class Compiled:
    """What a model's call is once it is compiled.

    Attributes:
        shape: of the inputs that are compiled for.
    """

    def __init__(self, model: nn.Module, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self._model, self._plain = model, model._call_impl
        self._code = torch.compile(model._call_impl, backend=inductor, dynamic=False)

    def __call__(self, inputs: Any, *more: Any, **named: Any) -> Any:
        """Compiled, if this is a training pass over inputs of that shape."""
        training = self._model.training and torch.is_grad_enabled()
        if training and getattr(inputs, "shape", None) == self.shape:
            return self._code(inputs, *more, **named)
        return self._plain(inputs, *more, **named)


def compile_(model: nn.Module, shape: Sequence[int]) -> None:
    """Compiles a model in place, for training passes over inputs of `shape`; it keeps its names.

    Copies of it are not compiled. Compiling itself waits for the first such pass.
    """
    import torch._dynamo.config as limits

    limits.recompile_limit = VARIANTS  # ty: ignore[invalid-assignment]
    model._compiled_call_impl = Compiled(model, shape)


def undo_compile_(model: nn.Module) -> None:
    """Undoes `compile_`."""
    model._compiled_call_impl = None


def compiled_shape(model: nn.Module) -> tuple[int, ...] | None:
    """What a model was compiled for by `compile_`; None if it was not."""
    code = getattr(model, "_compiled_call_impl", None)
    return code.shape if isinstance(code, Compiled) else None


@contextmanager
def uncompiled() -> Generator[None, None, None]:
    """Within it all that is compiled, by whomever, runs as plain Python."""
    if "torch._dynamo" not in sys.modules:  # nothing is, and loading it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def try_compiled(
    model: nn.Module,
    shape: Sequence[int],
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], None],
    any_rank: Callable[[bool], bool] = bool,
) -> tuple[float, str]:
    """Compiles a model in place and tries it: one pass forward and backward, that leaves no trace.

    Weights, buffers, gradients and random generators are afterwards what they were. Where it fails, on any rank, the
    model is plain again. What an earlier run of this process has compiled is forgotten first: it would count against
    this run's limits.

    Args:
        model: on its device, wrapped for its ranks.
        shape: of a micro-batch's inputs.
        forward: runs the model on such inputs, as a step does; returns the loss.
        backward: differentiates it.
        any_rank: whether something is so on any rank.

    Returns:
        the seconds it took, and why it failed; empty where it did not.

    Raises:
        Exception: what the model raises when it is not compiled either.
    """
    began = time.perf_counter()
    held = [buffer.clone() for buffer in model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # a backward pass would add to it in place
    loss, why = None, ""
    with rng_restored(model), torch.enable_grad():
        torch.compiler.reset()  # loading the compiler draws random numbers too
        compile_(model, shape)
        try:
            loss, why = attempt(forward, any_rank)
            if loss is not None:
                _, why = attempt(lambda: backward(loss), any_rank)
            if why:
                undo_compile_(model)
                if loss is None:
                    forward()  # a mistake in the model itself is told as such
        finally:
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), held, strict=True):
                    buffer.copy_(before)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
    return time.perf_counter() - began, why


def attempt(act: Callable[[], Any], any_rank: Callable[[bool], bool]) -> tuple[Any, str]:
    """What `act` returns, and an empty reason; None and the reason, where it fails on any rank."""
    found, why = None, ""
    try:
        found = act()
    except StabletrainError:  # the step's own checks
        raise
    except Exception as error:  # whatever a compiler raises
        why = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    if any_rank(bool(why)):
        return None, why or "it failed on another rank"
    return found, ""
