"""Decides which skipped steps and alarms are investigated, and collects what an investigation needs."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from stabletrain.buffers import SavedBuffers
from stabletrain.forensics.agreement import NotInvestigated
from stabletrain.forensics.facts import same_bits
from stabletrain.forensics.handler import IncidentSummary
from stabletrain.forensics.investigate import IncidentRequest
from stabletrain.forensics.probes.samples import MAX_LISTED, bad_samples, describe
from stabletrain.forensics.probes.update import UpdateFault, update_fault
from stabletrain.forensics.repro import Repro
from stabletrain.forensics.subject import StepSubject
from stabletrain.guard.checks.copies import put_back_after
from stabletrain.guard.checks.recheck import repeats_exactly
from stabletrain.guard.checks.state_check import NoStateCheck
from stabletrain.guard.checks.written import state_is_finite, update_is_finite
from stabletrain.machine.compiling import compiled_shape
from stabletrain.parallel.single import SingleProcess
from stabletrain.printable import is_round
from stabletrain.records import Batch, Reading, TrainState, Verdict
from stabletrain.step import InFlight, apply, compute
from stabletrain.tools import Tools
from stabletrain.trainer.run import TrainingRun

UNUSED_BATCHES = 1_000_003
"""A replay reads its fresh batch at this multiple of the step number, a position that the run never reaches."""

DAMAGED = "weights or moments have changed since the last update"


class ExecutedStep(NamedTuple):
    """A committed step, with what is needed to investigate it.

    Attributes:
        in_flight: the step's reading, on its way to the host.
        batch: the step's batch, on the host.
        classes: number of classes of the targets; None if unknown, or if targets are no class ids.
        saved_buffers: copies of the model's buffers before the step; the next forward pass overwrites the live ones.
    """

    in_flight: InFlight
    batch: Batch
    classes: int | None
    saved_buffers: SavedBuffers

    def reading(self) -> Reading:
        """Waits for the step's reading and returns it."""
        return self.in_flight.wait()

    def micro_batches(self, device: torch.device, parts: int) -> list[Batch]:
        """Returns the step's micro-batches on the device."""
        return self.batch.to(device).split(parts)


def investigate_skip(run: TrainingRun, executed: ExecutedStep, reading: Reading, verdict: Verdict) -> Verdict:
    """Records a skipped step, and investigates it if it is the first in a row; returns the verdict on it.

    The verdict becomes RESTORE if the machine was at fault: if the state is damaged, or a repetition of the step gives
    other results. A step that halts the run is also investigated, unless the newest incident is of the same kind.
    Skipped steps without an incident are printed only if `is_round` selects their count.
    """
    guard, tracker = run.tools.guard, run.tracker
    reason, samples = guard.reason, {}
    # Name what is bad, so that the user can look at it: samples of the batch, or tensors of the state. Each rank
    # inspects its own part, and all ranks get the whole list.
    if guard.kind == "bad_data":
        mine: list[dict[str, Any]] = []
        with suppress(Exception):  # a user's batch may hold anything, and the other ranks wait
            mine = bad_samples(
                transformed(executed.batch, run.device), run.tools.sanitizer.vocab_size, executed.classes
            )
        bad = run.parallel.gather_samples(mine, len(executed.batch))[:MAX_LISTED]
        reason, samples = describe(bad), {"samples": bad}
    if guard.kind == "state":
        samples = {"tensors": changed_tensors(run.state.model, guard.state_check, run.parallel)}
    # The event comes before the investigation, which takes long and may be killed.
    tracker.event(
        "skip",
        reading.step,
        kind=guard.kind,
        reason=reason,
        tick=run.state.executed_steps,
        loss=reading.loss,
        grad_norm=reading.grad_norm,
        loss_scale=reading.loss_scale,
        **samples,
    )
    if guard.kind == "overflow":  # routine in fp16: an overflow only lowers the loss scale
        return verdict
    if guard.kind == "recheck" and guard.recheck.found is None:  # this model's results vary: no fault
        return verdict
    handler = run.forensics.handler
    # Only the first skip in a row is investigated: the others have the same cause, and each replay costs some steps.
    in_state = guard.kind in ("state", "recheck")
    if guard.consecutive == 1 or in_state or (verdict is Verdict.HALT and guard.kind != handler.newest):
        finite = all(map(math.isfinite, (reading.loss, reading.grad_norm, reading.buffers)))
        # bad inputs may make the step non-finite; a bad label does not
        kind = "nonfinite" if guard.kind == "bad_data" and not finite else guard.kind
        incident = handle_incident(run, executed, reading, kind)
        if incident is not None:
            guard.note_mistake(incident)  # so that a rollback is not repeated for the same mistake
        verdict = check_machine(run, executed, reading, verdict, None if incident is None else incident.cause)
        if incident is not None and not incident.known:
            handler.newest = guard.kind
            return verdict
    number = guard.skips[guard.kind]
    # a rollback or a halt prints its own message, so only plain skips are logged here
    if verdict is Verdict.SKIP and is_round(number):
        tracker.note(f"step {reading.step}: {reason}; update skipped ({guard.kind}, number {number})")
    return verdict


def check_machine(
    run: TrainingRun, executed: ExecutedStep, reading: Reading, verdict: Verdict, cause: str | None
) -> Verdict:
    """Returns RESTORE for a skipped step if memory or arithmetic was at fault, and not the data or the settings.

    Args:
        verdict: the guard's.
        cause: what the investigation found; None if there was none.
    """
    guard, state, tools = run.tools.guard, run.state, run.tools
    if guard.kind not in ("nonfinite", "spike", "update"):
        return verdict
    # Weights or moments that are not finite: every later step would be skipped, so restore an older state.
    damaged = cause == "corrupt_state" or not state_is_finite(state.model, state.optimizer)
    if run.parallel.any_rank(damaged):
        found = guard.on_machine_fault(reading.step, f"{guard.reason}: {DAMAGED}", damaged=True, otherwise=verdict)
        if found is not verdict:
            guard.kind = "state"
        return found
    # Otherwise repeat the step: on a machine without fault it gives the same bits. This costs a whole step, so it is
    # done only for the first skip in a row.
    if guard.consecutive > 1 or guard.retried_step == reading.step or not repeats_exactly(state.model, run.device):
        return verdict
    if reading.bad_update:
        differs = is_finite_when_repeated(state, run.device)
    else:
        micro_batches = executed.micro_batches(run.device, run.plan.grad_accum_steps)
        differs = differs_when_repeated(state, tools, executed, micro_batches, reading)
    if not run.parallel.any_rank(differs):
        return verdict
    return guard.on_machine_fault(reading.step, guard.reason, damaged=False, otherwise=verdict)


def differs_when_repeated(
    state: TrainState, tools: Tools, executed: ExecutedStep, micro_batches: list[Batch], reading: Reading
) -> bool:
    """Computes a skipped step again; returns whether loss or gradient norm have other bits. All ranks must call it.

    The gradients of the next step, if it has been computed, are lost.
    """
    executed.saved_buffers.put_back()
    state.step -= 1
    computed = compute(state, micro_batches, tools)
    state.step += 1
    terms, norms, _ = tools.parallel.reduce_stats(computed.terms, computed.norms, computed.checks)
    executed.saved_buffers.put_back()
    executed.in_flight.recomputed = True
    loss, norm = torch.stack([terms.total, norms.total]).float().tolist()
    return not (same_bits(loss, reading.loss) and same_bits(norm, reading.grad_norm))


def is_finite_when_repeated(state: TrainState, device: torch.device) -> bool:
    """Repeats an optimizer's step whose update was undone; returns whether it is finite now. Restores everything."""
    with put_back_after(state.model, state.optimizer):
        apply(state.optimizer, torch.ones((), dtype=torch.bool, device=device))
        return update_is_finite(state.model, state.optimizer)


def changed_tensors(model: nn.Module, state_check: NoStateCheck, parallel: SingleProcess) -> list[str]:
    """Returns which tensors changed between two updates, on any rank; all ranks must call it."""
    ranks = parallel.ranks
    whose = f"rank {ranks.rank}: " if ranks.distributed else ""
    mine = [{"index": None, "what": f"{whose}{each}"} for each in state_check.changes(model)]
    return [each["what"] for each in parallel.gather_samples(mine, 1)]


def handle_incident(run: TrainingRun, executed: ExecutedStep, reading: Reading, kind: str) -> IncidentSummary | None:
    """Investigates a step, and files and shows what is new; returns None if there was no investigation.

    If an error prevents it, one line says so.

    All ranks must call it before the next step changes the state.
    """
    tracker = run.tracker
    # Under FSDP an investigation needs the whole weights, of this step and of an older one that still was healthy.
    states = run.parallel.whole_state(
        run.state.model, lambda: run.saved.snapshots.newest(reading.step - 2), run.forensics.model_factory
    )
    try:
        request = IncidentRequest(
            kind,
            optimizer=run.state.optimizer if run.parallel.has_whole_moments else None,
            limits=run.tools.guard.bounds,
            classes=executed.classes,
            tick=run.state.executed_steps,
        )
        filed = run.forensics.handler.handle(request, lambda: StepSubject(make_repro(run, executed, reading)), states)
    except NotInvestigated as error:
        tracker.event("not_investigated", reading.step, tick=run.state.executed_steps, kind=kind, reason=str(error))
        tracker.note(f"step {reading.step}: this incident is not investigated: {error}")
        return None
    if filed is None or filed.known:
        return filed
    tracker.event(
        "incident",
        reading.step,
        tick=run.state.executed_steps,
        kind=kind,
        cause=filed.cause,
        verdict=filed.verdict,
        fix=list(filed.fix),
        path=None if filed.path is None else f"incidents/{filed.path.name}",
    )
    for line in filed.lines:
        tracker.note(line)
    tracker.alert(f"incident: {filed.cause}", "\n".join(filed.lines))
    return filed


def make_repro(run: TrainingRun, executed: ExecutedStep, reading: Reading) -> Repro:
    """Collects what a replay of the step needs, without communication: the model may still be sharded.

    A skipped step has left the state unchanged, so the replay starts from exactly that state. An applied step has
    overwritten the state it started from, so its batch is replayed on the updated weights and buffers.
    """
    model = run.state.model
    return Repro(
        model=model,
        buffers=[*model.buffers()] if reading.applied else executed.saved_buffers.tensors(),
        step=reading.step - 1,
        batch=transformed(executed.batch, run.device),
        micro_batches=run.plan.grad_accum_steps,
        tools=run.tools,
        loss_scale=reading.loss_scale,
        device=run.device,
        reading=reading,
        part=run.parallel.rank_part(
            executed.in_flight.own, run.tools.objective.own_factor(executed.batch), reading.loss_scale
        ),
        compiled_for=compiled_shape(model),
        changes=run.tools.guard.state_check.changes(model) if reading.state_changed else (),
        update=repeat_of_update(run.state, run.device, reading),
        applied=reading.applied,
        recheck=run.tools.guard.recheck.found,
        fresh=lambda: transformed(run.data.load(UNUSED_BATCHES * (reading.step + 1)), run.device),
        metadata=run.forensics.metadata,
    )


def repeat_of_update(
    state: TrainState, device: torch.device, reading: Reading
) -> Callable[[], UpdateFault | None] | None:
    """Returns a function that repeats a bad update and names its fault; None if the update was not bad."""
    if not reading.bad_update:
        return None
    if reading.applied:  # the step was repeated, and its second update was finite
        return lambda: None
    opened = torch.ones((), dtype=torch.bool, device=device)
    return lambda: update_fault(state.model, state.optimizer, lambda: apply(state.optimizer, opened))


def transformed(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch with its transform applied: on the device, as in training, so that the bits are the same."""
    return batch if batch.transform is None else batch.to(device).to(torch.device("cpu"))
