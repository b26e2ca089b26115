"""Replays one step on a copy of the model, unchanged or with one thing changed.

| variant | what is changed | what the result shows |
|---|---|---|
| same | nothing | not bitwise equal: a hardware fault, or a nondeterministic operation |
| fp32 | no autocast, no loss scale, no TF32, parameters in fp32 | finite: range or precision of a format is to blame |
| fresh_batch | another batch | finite: this batch is to blame |
| older_state | weights and buffers of an earlier step | finite: the updates since then are to blame |

A replay runs `step.compute`. The unchanged replay of a compiled step is compiled too, to give the same bits. All
others run eagerly, because compiling takes long and an investigation's time is limited. A replay leaves live weights,
buffers, gradients, random generators, modes, hooks and kernel settings unchanged.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from stabletrain.errors import StabletrainError
from stabletrain.forensics.facts import Outcome, compare
from stabletrain.forensics.repro import Repro
from stabletrain.machine.compiling import compile_, compiled_shape, uncompiled
from stabletrain.machine.determinism import rng_restored
from stabletrain.records import Batch, TrainState
from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.stability.precision.kernels import ieee_kernels
from stabletrain.step import compute
from stabletrain.tools import Tools


class ReplayInputs(NamedTuple):
    """The model, batches and tools that a variant runs."""

    model: nn.Module
    batches: list[Batch]
    tools: Tools


class NotPossible(StabletrainError):
    """Raised if something is missing that the variant needs."""


def same(repro: Repro) -> ReplayInputs:
    """The step unchanged."""
    return unchanged_on(repro.copy_model(), repro)


def unchanged_on(model: nn.Module, repro: Repro) -> ReplayInputs:
    """The step unchanged, on a copy of the model."""
    return ReplayInputs(model, repro.to_micro_batches(repro.batch), repro.replay_tools())


def fp32(repro: Repro) -> ReplayInputs:
    """The step in true fp32. Run it inside `ieee_kernels`."""
    model = repro.copy_model()
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.float()
    tools = replace(repro.replay_tools(), precision=Unscaled("fp32", repro.device, torch.float32))
    return ReplayInputs(model, repro.to_micro_batches(repro.batch), tools)


def fresh_batch(repro: Repro) -> ReplayInputs:
    """Another batch on the same state."""
    if repro.fresh is None:
        raise NotPossible("there is no other batch")
    return ReplayInputs(repro.copy_model(), repro.to_micro_batches(repro.fresh()), repro.replay_tools())


def older_state(repro: Repro) -> ReplayInputs:
    """The same batch on an older state."""
    tree = None if repro.older is None else repro.older()
    if tree is None:
        raise NotPossible("there is no older state")
    model = repro.copy_model()
    model.load_state_dict(tree["model"])
    return ReplayInputs(model, repro.to_micro_batches(repro.batch), repro.replay_tools())


VARIANTS: dict[str, Callable[[Repro], ReplayInputs]] = {
    "same": same,
    "fp32": fp32,
    "fresh_batch": fresh_batch,
    "older_state": older_state,
}
"""The variants by name, in the order in which they run until the deadline; but a compiled one runs last."""


class CompiledCopy:
    """A copy of a repro's model that is compiled once, however often the step is replayed on it."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None

    def of(self, repro: Repro) -> nn.Module:
        """Returns the copy as it was before the step."""
        if self._model is None:
            assert repro.compiled_for is not None
            self._model = repro.copy_model()
            compile_(self._model, repro.compiled_for)
        for parameter in self._model.parameters():
            parameter.grad = None
        repro.reset_(self._model)
        return self._model

    def drop(self) -> None:
        """Frees its memory."""
        self._model = None


def runs_compiled(repro: Repro, variant: str) -> bool:
    """Whether a replay is compiled: only if it must give the bits of a compiled step."""
    return variant == "same" and repro.compiled_for is not None and repro.comparable


def in_true_fp32(variant: str) -> contextlib.AbstractContextManager:
    """Returns the context to run a variant in: `fp32` computes without TF32."""
    return ieee_kernels() if variant == "fp32" else contextlib.nullcontext()


def replay(repro: Repro, variant: str, compiled_copy: CompiledCopy | None = None) -> Outcome:
    """Replays the step as one of `VARIANTS`; never raises because of the model.

    Args:
        compiled_copy: the model of a compiled replay; None for a new copy.
    """
    compiled, part = runs_compiled(repro, variant), None if repro.applied else repro.part

    def run() -> tuple[float, float, float]:
        copy = (compiled_copy or CompiledCopy()).of(repro) if compiled else None
        inputs = VARIANTS[variant](repro) if copy is None else unchanged_on(copy, repro)
        with in_true_fp32(variant):
            return forward_backward(*inputs, repro.step)

    outcome = outcome_of(run, repro.deadline)
    if compiled and outcome.not_run:  # perhaps compilation failed: replay uncompiled, marked as not comparable
        if compiled_copy is not None:
            compiled_copy.drop()
        return replay(replace(repro, compiled=True, compiled_for=None), variant)
    if variant != "same" or outcome.loss is None or outcome.grad_norm is None:
        return outcome
    equal = compare(outcome.loss, outcome.grad_norm, repro.reading, part, repro.comparable)
    return replace(outcome, bitwise_equal_to_reading=equal)


def outcome_of(run: Callable[[], tuple[float, float, float]], deadline: float) -> Outcome:
    """Runs a replay until it is too late to begin; never raises because of the model.

    Args:
        run: returns loss, gradient norm, and the share of gradient elements that are 0.
        deadline: in `time.monotonic()` seconds.
    """
    began = time.monotonic()
    if began >= deadline:
        return Outcome(not_run="the time limit was reached")
    try:
        loss, norm, zeros = run()
    except NotPossible as error:
        return Outcome(not_run=str(error))
    except Exception as error:  # a user's model may raise anything, and an investigation must not end the run
        return Outcome(not_run=" ".join(f"{type(error).__name__}: {error}".split())[:200])
    finite = math.isfinite(loss) and math.isfinite(norm)
    return Outcome(finite, loss, norm, None, zeros, time.monotonic() - began)


def forward_backward(model: nn.Module, batches: list[Batch], tools: Tools, step: int) -> tuple[float, float, float]:
    """Runs forward and backward of step number `step` on a copy of the model.

    Returns:
        loss, gradient norm, and the share of gradient elements that are 0. The gradients stay in `.grad`.
    """
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0), step)
    # The copy is uncompiled unless `replay` compiled it: keep the compiler away from the user's own `torch.compile`.
    plain = uncompiled() if compiled_shape(model) is None else contextlib.nullcontext()
    with rng_restored(model), plain, torch.enable_grad():
        computed = compute(state, batches, tools)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    count = sum(gradient.numel() for gradient in gradients)
    return float(computed.terms.total), float(computed.norms.total), zeros / max(count, 1)
