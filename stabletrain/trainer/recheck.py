"""A computation that came out differently the second time: a third one tells which was wrong, or that neither repeats.

A step that was withheld although its data are innocent is taken again, and then computed twice (`compute_twice`).

A third result that equals one of the two shows that the other was wrong: the hardware. If it does not equal the second
and no two results ever agreed in this run, the model is at fault: its forward pass depends on more than weights,
buffers, batch and PyTorch's random numbers, such as a file or a list that it appends to. This is said once, and the
limit is learnt from then on. Where bits may differ there is no third computation: above what is usual, the hardware is
at fault.
"""

import math
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stabletrain.forensics.repro import at_scale, copy_of_model
from stabletrain.machine import hardware
from stabletrain.machine.compiling import compiled_shape, uncompiled
from stabletrain.machine.determinism import rng_restored
from stabletrain.monitors.tensor_norms import gradients
from stabletrain.records import Batch, Reading, Verdict
from stabletrain.stability.guard.comparing import Compared, sums
from stabletrain.stability.guard.recheck import Finding, NoRecheck, repeats_exactly
from stabletrain.step import Computed, compute, count_targets, forward_backward
from stabletrain.trainer.incidents import ExecutedStep, handle_incident
from stabletrain.trainer.run import TrainingRun


def rehearse(recheck: NoRecheck, first: int, steps: int) -> None:
    """Has a step of this process repeated at once, if one will be repeated later: none needs more memory.

    Args:
        first: number of the process's first step, counted from 0.
        steps: of the run.
    """
    if recheck.every and steps // recheck.every > first // recheck.every:
        recheck.rehearse(max(first, 1))  # the first step of a run has no moments yet


def tell_if_given_up(run: TrainingRun, reading: Reading) -> None:
    """Tells that nothing is repeated any more, if memory did not suffice for it on some rank."""
    if not run.tools.guard.recheck.gives_up(reading):
        return
    tracker = run.rollback.tracker
    tracker.event("recheck_off", reading.step, reason="out of memory", tick=run.state.executed_steps)
    tracker.note(
        f"step {reading.step}: too little memory to compute a gradient and an update twice, so arithmetic is not "
        "checked in this process; training is not affected. fix: a smaller batch_size, or more grad_accum_steps"
    )


def confirm(run: TrainingRun, executed: ExecutedStep, reading: Reading, verdict: Verdict) -> Verdict:
    """Returns the verdict on a step whose repetition differs: the guard's, or that of a step without a fault.

    Sets `found` of the guard's recheck if it is a fault, and files the incident of an update that was applied. All
    ranks must call it before the next step begins.
    """
    recheck, tracker = run.tools.guard.recheck, run.rollback.tracker
    part = recheck.wrong(reading)
    finding = find(run, executed, reading, part)
    if not run.parallel.any_rank(finding.differs):  # it was taken again, and its two computations differ again
        return verdict
    # If the third equals the first and none ever agreed, something that cannot be put back changed the second one: the
    # step itself was right.
    repeats = finding.third == "second" or recheck.knows(part)
    if not run.parallel.any_rank(finding.differs and repeats):
        recheck.vary(part)
        tracker.event("recheck_varies", reading.step, part=part, tick=run.state.executed_steps)
        tracker.note(
            f"step {reading.step}: a second computation of the {part} never gives the same bits with this model: its "
            "code may depend on more than weights, buffers, batch and random numbers; guard.recheck_every now compares "
            "with a limit that is learnt"
        )
        return Verdict.APPLY if reading.applied else Verdict.SKIP
    recheck.found, guard = finding, run.tools.guard
    if reading.applied:
        fields = {"kind": "recheck", "part": part, "reason": guard.reason}
        tracker.event("distrust", reading.step, tick=run.state.executed_steps, **fields)
        handle_incident(run, executed, reading, "recheck")
        return guard.on_machine_fault(reading.step, guard.reason, damaged=True)
    return guard.on_machine_fault(reading.step, guard.reason, damaged=False, otherwise=verdict)


def compute_twice(run: TrainingRun, micro_batches: Sequence[Batch]) -> Computed:
    """Runs forward and backward of a step twice, and closes its gate unless all gradients have the same bits.

    Where bits may differ, the recheck of the step, which is due again, tells more.
    """
    state, tools = run.state, run.tools
    first = compute(state, micro_batches, tools)
    if tools.guard.recheck.varies or not repeats_exactly(state.model, run.device):
        return first
    bits = sums(gradients(state.model), run.device)
    first.buffers.put_back()
    first.buffers.restore_(first.saved_buffers, torch.zeros((), dtype=torch.bool, device=run.device))
    computed = compute(state, micro_batches, tools)
    differs = (bits != sums(gradients(state.model), run.device)).any().float()
    tools.parallel.max_over_ranks_([differs])
    known = computed.checks.recheck
    known = known if isinstance(known, torch.Tensor) else torch.full((), known, device=run.device)
    difference = torch.where(differs > 0, math.inf, known)
    return replace(computed, checks=replace(computed.checks, recheck=difference))


def find(run: TrainingRun, executed: ExecutedStep, reading: Reading, part: str) -> Finding:
    """Collects what is known of the newest repetition of a part; waits for the device."""
    recheck = run.tools.guard.recheck
    compared, limit = recheck.compared.get(part), recheck.limit(part)
    ranks = run.parallel.ranks
    place = f"device {run.device} ({hardware.name(run.device)}), host {platform.node()}, rank {ranks.rank}"
    agreed = recheck.agreed(part)
    if compared is None:
        return Finding(part, False, [], "", agreed, limit, place)
    ratios, limits = compared.ratios.tolist(), [0.0] * len(compared.names)
    if compared.limits is not None:
        limits = compared.limits.tolist()
    beyond = [each for each in zip(compared.names, ratios, limits, strict=True) if each[1] > each[2]]
    beyond.sort(key=lambda each: -each[1] / (each[2] or 1.0))
    third = which(run, executed, reading, compared) if beyond and limit == 0 else ""
    allowed = beyond[0][2] if beyond else limit
    return Finding(part, bool(beyond), [each[:2] for each in beyond], third, agreed, allowed, place)


def which(run: TrainingRun, executed: ExecutedStep, reading: Reading, compared: Compared) -> str:
    """Computes a third time; returns which result that equals, as in `Finding`."""
    if compared.again is None and compiled_shape(run.state.model) is not None:
        return ""  # a copy is not compiled, so it computes other bits
    try:
        third = again(run, executed, reading, compared) if compared.again is None else compared.again()
    except Exception:  # a user's model may raise anything, and the two results are known
        return ""
    if torch.equal(third, compared.first):
        return "first"
    return "second" if torch.equal(third, compared.second) else "neither"


def again(run: TrainingRun, executed: ExecutedStep, reading: Reading, compared: Compared) -> Tensor:
    """Computes the gradients of the step's first micro-batch on a copy of the model; returns the sums of their bits."""
    assert compared.generators is not None
    model = copy_of_model(run.state.model)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), executed.saved_buffers.tensors(), strict=True):
            buffer.copy_(before)
    tools, device = run.tools, run.device
    precision = at_scale(tools.precision, reading.loss_scale)
    batches = executed.batch.to(device).split(run.plan.grad_accum_steps)
    n_valid, _ = count_targets(batches)
    first = next(batch for batch in batches if batch.targets.numel())
    with rng_restored(model), uncompiled(), torch.enable_grad():
        compared.generators.set()
        tools = replace(tools, precision=precision)
        forward_backward(tools.wrap_alone(model), first, n_valid, tools)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return sums([gradients[name] for name in compared.names], device)
