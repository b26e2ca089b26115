"""Replays one step of the trainer on a copy of the model, as one of the variants of `rerun.py`.

A replay runs `step.compute`. The unchanged replay of a compiled step is compiled too, to give the same bits. All
others run eagerly, because compiling takes long and an investigation's time is limited. A replay leaves live weights,
buffers, gradients, random generators, modes, hooks and kernel settings unchanged.
"""

import contextlib
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from stabletrain.forensics.repro import Repro
from stabletrain.forensics.rerun import NotPossible, RerunResult, Watch, in_true_fp32
from stabletrain.machine.compiling import compile_, compiled_shape, uncompiled
from stabletrain.machine.determinism import rng_restored
from stabletrain.records import Batch, TrainState
from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.step import compute
from stabletrain.tools import Tools


class ReplayInputs(NamedTuple):
    """What a replay runs.

    Attributes:
        model: a copy of the model.
        step: number of the step, counted from 0; seeds its randomness.
        true_fp32: whether everything is computed in fp32.
    """

    model: nn.Module
    batches: list[Batch]
    tools: Tools
    step: int
    true_fp32: bool = False

    def run(self, watch: Watch | None = None) -> RerunResult:
        """Runs forward and backward of the step. The gradients stay in `.grad`."""
        with contextlib.ExitStack() as stack:
            if self.true_fp32:
                stack.enter_context(in_true_fp32(self.model))
            if watch is not None:
                stack.enter_context(watch(self.model))
            return forward_backward(self.model, self.batches, self.tools, self.step)

    def with_plain_objective(self) -> "ReplayInputs":
        """Returns the inputs for a replay that uses the whole logits, not chunks."""
        return self._replace(tools=replace(self.tools, objective=self.tools.objective.plain))


def inputs_of(repro: Repro, variant: str = "same") -> ReplayInputs:
    """Returns what a replay runs as one of `VARIANTS`, on a new copy of the model.

    Raises:
        NotPossible: there is no other batch or no older state.
    """
    batch, tools, older = repro.batch, repro.replay_tools(), None
    if variant == "fresh_batch":
        if repro.fresh is None:
            raise NotPossible("there is no other batch")
        batch = repro.fresh()
    elif variant == "older_state":
        older = repro.older()
        if older is None:
            raise NotPossible("there is no older state")
    elif variant == "fp32":
        tools = replace(tools, precision=Unscaled("fp32", repro.device, torch.float32))
    model = repro.copy_model()
    if older is not None:
        model.load_state_dict(older["model"])
    return ReplayInputs(model, repro.to_micro_batches(batch), tools, repro.step, variant == "fp32")


class CompiledCopy:
    """A copy of a repro's model that is compiled once, however often the step is replayed on it."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None

    def inputs_of(self, repro: Repro) -> ReplayInputs:
        """Returns what an unchanged replay runs, on the copy as it was before the step."""
        if self._model is None:
            assert repro.compiled_for is not None
            self._model = repro.copy_model()
            compile_(self._model, repro.compiled_for)
        for parameter in self._model.parameters():
            parameter.grad = None
        repro.reset_(self._model)
        return ReplayInputs(self._model, repro.to_micro_batches(repro.batch), repro.replay_tools(), repro.step)

    def drop(self) -> None:
        """Frees its memory."""
        self._model = None


def runs_compiled(repro: Repro, variant: str) -> bool:
    """Whether a replay is compiled: only if it must give the bits of a compiled step."""
    return variant == "same" and repro.compiled_for is not None and repro.comparable


def forward_backward(model: nn.Module, batches: list[Batch], tools: Tools, step: int) -> RerunResult:
    """Runs forward and backward of step number `step` on a copy of the model. The gradients stay in `.grad`."""
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0), step)
    # An uncompiled copy runs eagerly: keep the compiler away from the user's own `torch.compile`.
    plain = uncompiled() if compiled_shape(model) is None else contextlib.nullcontext()
    with rng_restored(model), plain, torch.enable_grad():
        computed = compute(state, batches, tools)
    gradients = [parameter.grad for parameter in model.parameters()]
    return RerunResult(float(computed.terms.total), float(computed.norms.total), gradients)
