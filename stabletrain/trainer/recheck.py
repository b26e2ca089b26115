"""Computes a step twice: in a rehearsal, and when a step is repeated after a fault of the machine."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from stabletrain.guard.checks.comparing import sums
from stabletrain.guard.checks.recheck import NoRecheck, repeats_exactly
from stabletrain.monitors.tensor_norms import gradients
from stabletrain.records import Batch, TrainState
from stabletrain.step import Computed, compute
from stabletrain.tools import Tools


def rehearse(recheck: NoRecheck, first: int, steps: int) -> None:
    """Repeats one of the first steps of this process, if a later one will be repeated: no other needs more memory.

    Args:
        first: number of the process's first step, counted from 0.
        steps: number of steps of the run.
    """
    if recheck.every and steps // recheck.every > first // recheck.every:
        recheck.rehearse(max(first, 1))  # the first step of a run has no moments yet


def compute_twice(state: TrainState, micro_batches: Sequence[Batch], tools: Tools, device: torch.device) -> Computed:
    """Runs forward and backward of a step twice, and closes its gate unless all gradients have the same bits.

    Where bits may differ it runs them once: the step's recheck, which is due again, compares with a limit.
    """
    first = compute(state, micro_batches, tools)
    if tools.guard.recheck.varies or not repeats_exactly(state.model, device):
        return first
    bits = sums(gradients(state.model), device)
    first.saved_buffers.put_back(first.buffers)
    computed = compute(state, micro_batches, tools)
    differs = (bits != sums(gradients(state.model), device)).any().float()
    tools.parallel.max_over_ranks_([differs])
    difference = torch.where(differs > 0, math.inf, computed.checks.recheck)
    return replace(computed, checks=replace(computed.checks, recheck=difference))
