"""Decides what was wrong if the repetition of a computation gave a different result: the hardware, or the model.

A third computation decides. If its result equals one of the two, the hardware computed the other one wrongly. If it
does not equal the second, and no two results were ever equal in this run, the model is at fault: its forward pass
depends on more than weights, buffers, batch and PyTorch's random numbers, such as a file or a list that it appends to.
The user is told once, and the limit is learnt from then on. Where bits may differ there is no third computation: a
difference above its limit is the hardware's fault.

A step that was skipped because of a fault of the machine is repeated, and then computed twice (`compute_twice`).
"""

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from stabletrain.buffers import SavedBuffers
from stabletrain.forensics.model_copy import copy_of_model, with_loss_scale
from stabletrain.guard.checks.comparing import Compared, sums
from stabletrain.guard.checks.recheck import Finding, NoRecheck, repeats_exactly
from stabletrain.machine import hardware
from stabletrain.machine.compiling import compiled_shape, uncompiled
from stabletrain.machine.determinism import rng_restored
from stabletrain.monitors.tensor_norms import gradients
from stabletrain.records import Batch, Reading, TrainState, Verdict
from stabletrain.step import Computed, compute, count_targets, forward_backward
from stabletrain.tools import Tools
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.incidents import ExecutedStep, handle_incident
from stabletrain.trainer.run import TrainingRun


def rehearse(recheck: NoRecheck, first: int, steps: int) -> None:
    """Repeats one of the first steps of this process, if a later one will be repeated: no other needs more memory.

    Args:
        first: number of the process's first step, counted from 0.
        steps: number of steps of the run.
    """
    if recheck.every and steps // recheck.every > first // recheck.every:
        recheck.rehearse(max(first, 1))  # the first step of a run has no moments yet


def tell_out_of_memory(recheck: NoRecheck, reading: Reading, tracker: NoTracker, tick: int) -> None:
    """Ends repetitions and tells the user, if some rank had too little memory for this one."""
    if not recheck.runs_out_of_memory(reading):
        return
    tracker.event("recheck_off", reading.step, reason="out of memory", tick=tick)
    tracker.note(
        f"step {reading.step}: too little memory to compute a gradient and an update twice, so arithmetic is not "
        "checked in this process; training is not affected. fix: a smaller batch_size, or more grad_accum_steps"
    )


def confirm(run: TrainingRun, executed: ExecutedStep, reading: Reading, verdict: Verdict) -> Verdict:
    """Returns the verdict on a step whose repetition differs: the guard's, or that of a step without a fault.

    Sets `found` of the guard's recheck if it is a fault, and files the incident of an update that was applied. All
    ranks must call it before the next step begins.
    """
    recheck, tracker = run.tools.guard.recheck, run.tracker
    part, device = recheck.differing_part(reading), run.device

    def gradient_again(compared: Compared) -> Tensor:
        tools = replace(run.tools, precision=with_loss_scale(run.tools.precision, reading.loss_scale))
        micro_batches = executed.micro_batches(device, run.plan.grad_accum_steps)
        return third_gradient(run.state.model, tools, executed.saved_buffers, micro_batches, compared)

    def third(compared: Compared) -> str:
        if compared.again is None and compiled_shape(run.state.model) is not None:
            return ""  # a copy is not compiled, so it computes other bits
        return third_equals(compared.again or partial(gradient_again, compared), compared)

    place = f"device {device} ({hardware.name(device)}), host {platform.node()}, rank {run.parallel.ranks.rank}"
    finding = collect_finding(recheck, part, place, third)
    if not run.parallel.any_rank(finding.differs):  # `compute_twice` found the difference, not the recheck
        return verdict
    # If the third equals the first and no two results ever were equal, the second run read something that the first one
    # had changed and that cannot be restored: the step itself was right.
    repeats = finding.third == "second" or recheck.has_repeated(part)
    if not run.parallel.any_rank(finding.differs and repeats):
        recheck.learn_limit(part)
        tracker.event("recheck_varies", reading.step, part=part, tick=run.state.executed_steps)
        tracker.note(
            f"step {reading.step}: a second computation of the {part} never gives the same bits with this model: its "
            "code may depend on more than weights, buffers, batch and random numbers; guard.recheck_every now compares "
            "with a limit that is learnt"
        )
        return Verdict.APPLY if reading.applied else Verdict.SKIP
    # A fault of the hardware. If the update was applied, the weights are wrong: go back to before it. If not, only this
    # step's numbers are wrong: repeat the step.
    recheck.found, guard = finding, run.tools.guard
    if reading.applied:
        fields = {"kind": "recheck", "part": part, "reason": guard.reason}
        tracker.event("distrust", reading.step, tick=run.state.executed_steps, **fields)
        handle_incident(run, executed, reading, "recheck")
        return guard.on_machine_fault(reading.step, guard.reason, damaged=True)
    return guard.on_machine_fault(reading.step, guard.reason, damaged=False, otherwise=verdict)


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


def collect_finding(recheck: NoRecheck, part: str, place: str, third: Callable[[Compared], str]) -> Finding:
    """Collects what is known about the newest repetition of a part; waits for the device.

    Args:
        place: device, host and rank.
        third: computes a third time; see `third_equals`.
    """
    compared, limit, agreed = recheck.compared.get(part), recheck.limit(part), recheck.agreed(part)
    if compared is None:
        return Finding(part, False, [], "", agreed, limit, place)
    ratios, limits = compared.ratios.tolist(), [0.0] * len(compared.names)
    if compared.limits is not None:
        limits = compared.limits.tolist()
    exceeding = [each for each in zip(compared.names, ratios, limits, strict=True) if each[1] > each[2]]
    exceeding.sort(key=lambda each: -each[1] / (each[2] or 1.0))
    equal = third(compared) if exceeding and limit == 0 else ""
    allowed = exceeding[0][2] if exceeding else limit
    return Finding(part, bool(exceeding), [each[:2] for each in exceeding], equal, agreed, allowed, place)


def third_equals(compute_again: Callable[[], Tensor], compared: Compared) -> str:
    """Computes a third time; returns which result that equals, as in `Finding`."""
    try:
        third = compute_again()
    except Exception:  # a user's model may raise anything, and the two results are known
        return ""
    if torch.equal(third, compared.first):
        return "first"
    return "second" if torch.equal(third, compared.second) else "neither"


def third_gradient(
    model: nn.Module, tools: Tools, buffers: SavedBuffers, batches: Sequence[Batch], compared: Compared
) -> Tensor:
    """Computes the gradients of the step's first micro-batch on a copy of the model; returns the sums of their bits."""
    assert compared.generators is not None
    model = copy_of_model(model)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers.tensors(), strict=True):
            buffer.copy_(before)
    n_valid, _ = count_targets(batches)
    first = next(batch for batch in batches if batch.targets.numel())
    with rng_restored(model), uncompiled(), torch.enable_grad():
        compared.generators.set()
        forward_backward(tools.wrap_alone(model), first, n_valid, tools)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return sums([gradients[name] for name in compared.names], first.targets.device)
