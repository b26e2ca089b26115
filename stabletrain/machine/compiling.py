"""Compiles training with `torch.compile`: tried on one batch before the first step, with a fallback to eager mode.

A step's bits must depend on its number alone. So compiled code runs only training passes over inputs of one shape, the
run's own; every other pass (evaluation, sampling, shorter samples, monitors) runs eagerly. By default PyTorch would
recompile for a second shape with dynamic sizes, and a step would depend on what had run before.
"""

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.errors import StabletrainError
from stabletrain.machine.determinism import may_measure, rng_restored

RECOMPILE_LIMIT = 64
"""Recompilation limit per function, above which PyTorch silently runs eagerly. Each model copy for a replay counts."""


def should_compile(compile: str | bool, device: torch.device) -> bool:
    """Returns whether to try compiling. `auto` means: only on CUDA."""
    # On a CPU, compiling takes long and does not speed up the matrix products.
    return device.type == "cuda" if compile == "auto" else bool(compile)


def inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Runs PyTorch's compiler, restricted to code that gives the same bits each time.

    By default inductor sums the gradients of an embedding and of max-pooling with atomics, in any order, and selects
    kernels by measured speed. Here neither happens: the embedding's gradient comes from PyTorch's own kernel, and each
    pixel of max-pooling adds its windows in eager mode's order. Other scattered sums (a plug-in's `table[ids]`) are
    deterministic only with `determinism=strict`, as in eager mode. With `determinism=off`, speed selects the kernels.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback, require_contiguous

    aten = torch.ops.aten
    unordered = {aten.embedding_dense_backward.default, aten.max_pool2d_with_indices_backward.default}
    for operation in unordered - {*lowerings}:  # with CI set, PyTorch rejects unregistered fallbacks
        make_fallback(operation, require_contiguous, warn=False, override_decomp=True)
    rules = {operation: rule for operation, rule in select_decomp_table().items() if operation not in unordered}
    table = Decompositions(rules, sorted(map(str, unordered)))
    caches = torch.compiler.config
    tag = f"{caches.cache_key_tag} {table.name}"  # the user's, and ours
    with caches.patch(cache_key_tag=tag):  # ty: ignore[missing-attribute]
        return compile_fx(graph, inputs, config_patches={"deterministic": not may_measure()}, decompositions=table)


class Decompositions(dict):
    """PyTorch's decompositions without some, by operation; with a name that tells them from others in PyTorch's caches.

    Those keep compiled code on disk for later processes. One has the decompositions in its key, as a pickle; PyTorch's
    own have none. The other does not: without a name of ours there, it gives the code of a program that was compiled
    without this module.

    Args:
        rules: by operation.
        left_out: names of the operations without a rule.
    """

    def __init__(self, rules: Mapping[Any, Callable[..., Any]], left_out: Sequence[str]) -> None:
        super().__init__(rules)
        self.name = f"without decompositions of {', '.join(left_out)}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns the name alone; PyTorch's version, with which the rules come, is in the keys already."""
        return str, (self.name,)


class Compiled:
    """Replaces the call of a compiled model.

    Attributes:
        shape: of the inputs that are compiled for.
    """

    def __init__(self, model: nn.Module, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self._model, self._plain = model, model._call_impl
        self._code = torch.compile(model._call_impl, backend=inductor, dynamic=False)
        self._others: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, inputs: Any, *more: Any, **named: Any) -> Any:
        """Runs compiled code in a training pass over inputs of that shape; anything else eagerly."""
        training = self._model.training and torch.is_grad_enabled()
        if training and getattr(inputs, "shape", None) == self.shape:
            return self._code(inputs, *more, **named)
        return self._plain(inputs, *more, **named)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns compiled code for a function that runs outside of the model, such as the loss of a chunk."""
        if function not in self._others:
            self._others[function] = torch.compile(function, backend=inductor, dynamic=False)
        return self._others[function]


def compile_(model: nn.Module, shape: Sequence[int]) -> None:
    """Compiles a model in place, for training passes over inputs of `shape`. Parameter names do not change.

    Copies of the model are not compiled. Compilation itself happens in the first such pass.
    """
    import torch._dynamo.config as limits

    limits.recompile_limit = RECOMPILE_LIMIT  # ty: ignore[invalid-assignment]
    model._compiled_call_impl = Compiled(model, shape)


def undo_compile_(model: nn.Module) -> None:
    """Undoes `compile_`."""
    model._compiled_call_impl = None


def compiled_shape(model: nn.Module) -> tuple[int, ...] | None:
    """Returns the shape that `compile_` compiled a model for; None if it is not compiled."""
    code = getattr(model, "_compiled_call_impl", None)
    return code.shape if isinstance(code, Compiled) else None


def compiled_with(model: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` compiled if `compile_` compiled the model, else itself. Call it with one shape only."""
    code = getattr(model, "_compiled_call_impl", None)
    return code.compiled(function) if isinstance(code, Compiled) else function


@contextmanager
def uncompiled() -> Generator[None, None, None]:
    """A context in which all compiled code runs eagerly."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing dynamo takes seconds
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
    """Compiles a model in place and tries it: one forward and backward pass, without side effects.

    If the trial fails on any rank, the model is eager again on all.

    Args:
        model: on its device, wrapped for its ranks.
        shape: of a micro-batch's inputs.
        forward: runs the model on such inputs, as a step does; returns the loss.
        backward: differentiates the loss.
        any_rank: returns whether its argument is true on any rank.

    Returns:
        the seconds it took, and why it failed; empty if it succeeded.

    Raises:
        Exception: what the model raises when it is not compiled either.
    """
    began = time.perf_counter()
    held = [buffer.clone() for buffer in model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # the trial would accumulate into it in place
    loss, why = None, ""
    with rng_restored(model), torch.enable_grad():
        drop_compiled()  # it draws random numbers too
        compile_(model, shape)
        try:
            loss, why = attempt(forward, any_rank)
            if loss is not None:
                _, why = attempt(lambda: backward(loss), any_rank)
            if why:
                undo_compile_(model)
                if loss is None:
                    forward()  # raises the error of a model that fails eagerly too
        finally:  # leave no trace, whether the trial succeeded or not
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), held, strict=True):
                    buffer.copy_(before)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
    return time.perf_counter() - began, why


def drop_compiled() -> None:
    """Drops what earlier runs of this process compiled, which counts against the limit; not how long it took."""
    from torch._dynamo.utils import compilation_time_metrics as seconds

    before = {phase: [*each] for phase, each in seconds.items()}
    torch.compiler.reset()
    seconds.update(before)


def attempt(act: Callable[[], Any], any_rank: Callable[[bool], bool]) -> tuple[Any, str]:
    """Returns the result of `act` and an empty reason; if it fails on any rank, None and the reason."""
    found, why = None, ""
    try:
        found = act()
    except StabletrainError:  # the step's own checks are not the compiler's errors
        raise
    except Exception as error:  # a compiler may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    if any_rank(bool(why)):
        return None, why or "it failed on another rank"
    return found, ""
