"""The engine: what follows from a step's numbers. `train.py` and `Guard` judge, explain and undo a step here.

The life of a step, with the place of each stage in the trainer and in a loop of the user's own:

| stage | what happens | trainer | own loop |
|---|---|---|---|
| launched | forward and backward, on numbered batches or by a closure | `step.compute` | `Guard.backward` |
| gated | ranks agree; the gate closes on the device if a number is bad | `step.commit` | `Judge` |
| applied or held | the optimizer's step runs, or nothing changes | `step.commit` | `OwnLoop.apply`, `.hold` |
| read | the numbers are on the host | after the next step is launched (lag 1) | in `Judge`, before the update (lag 0) |
| judged | the policy's verdict, and a third computation if two differed | `settle` | `settle` |
| explained | the first of several held steps is investigated, the machine tested | `explain_held` | `explain_held` |
| kept | taken again without its guilty samples, if asked to | `keep_the_rest` | `keep_the_rest` |
| put back | taken again, restored, rolled back, or the end | `trainer/loop.py`, `rollback.py` | `loop_guard.py` |

A *held* step is one whose update was not applied, or was undone. The policy counts it as skipped, unless it is taken
again.

The two loops differ in three things, which `ReadStep` hides. *A part* of a step is forward and backward of a numbered
batch, or a call of a closure. *The lag*: at lag 1 the model holds the next step's gradients when a step is judged.
*What can be read again*: any batch by its number; the arguments of a closure; or nothing, in a loop that cannot be
edited.
"""

import math
import platform
from pathlib import Path

from stabletrain.forensics.agreement import NotInvestigated
from stabletrain.forensics.handler import IncidentSummary
from stabletrain.forensics.probes.samples import MAX_LISTED, describe
from stabletrain.guard.checks.copies import put_back_after
from stabletrain.guard.checks.recheck import collect_finding
from stabletrain.guard.checks.written import state_is_sound, update_is_finite
from stabletrain.guard.keeping import keep_the_rest, report_kept
from stabletrain.guard.read_step import ReadStep
from stabletrain.guard.rechecked import blame_neighbour, report_recheck, report_varying
from stabletrain.machine import hardware
from stabletrain.printable import is_round
from stabletrain.records import Reading, Verdict

DAMAGED = "weights or moments have changed since the last update"


def settle(step: ReadStep) -> Verdict:
    """Returns the verdict on a step: the policy's, unless a closer look changes it. All ranks must call it.

    The verdict becomes RESTORE if the machine was at fault, and APPLY or SKIP if a difference proves to be no fault. It
    becomes KEEP if a few samples were at fault: the step is to be taken again without them.
    """
    guard, reading = step.guard, step.reading
    # The policy's verdict on the numbers: apply, skip, roll back or halt. It also updates counts and limits.
    faults = guard.machine_faults
    verdict = guard.judge(reading)
    report_recheck(step)
    if guard.left_out:
        report_kept(step)
    # The first try of this step gave an update that was not finite, and this one did not.
    if reading.applied and guard.machine_faults > faults:
        explain(step, "update", reading._replace(bad_update=True, rank=guard.faulty_rank))
    # Two computations differ: a third one tells whether the machine or the model's code is at fault.
    if guard.recheck.differing_part(reading) and (guard.recheck.compared or guard.recheck.table):
        verdict = confirm(step, verdict)
    # If the step was held, the weights still have their values from before it: explain it now.
    return verdict if reading.applied else explain_held(step, verdict)


# ---- explaining a step


def explain_held(step: ReadStep, verdict: Verdict) -> Verdict:
    """Records a held step, and investigates it if it is the first in a row; returns the verdict on it.

    The verdict becomes RESTORE if the machine was at fault: if the state is damaged, or a repetition of the step gives
    other results. It becomes KEEP if the rest of the step can be kept. A step that halts the run is also investigated,
    unless the newest incident is of the same kind.
    Held steps without an incident are printed only if `is_round` selects their count.
    """
    guard, tracker, reading, handler = step.guard, step.tracker, step.reading, step.handler
    reason, named, judged, newly_filed = guard.reason, {}, verdict, None
    # Name what is bad, so that the user can look at it: samples of the batch, or tensors of the state. Each rank
    # inspects its own part, and all ranks get the whole list.
    if guard.kind == "bad_data":
        bad = step.parallel.gather_samples(*step.bad_samples())[:MAX_LISTED]
        reason, named = describe(bad), {"samples": bad}
    if guard.kind == "state":
        named = {"tensors": changed_tensors(step)}
    # The event comes before the investigation, which takes long and may be killed.
    fields = {"loss": reading.loss, "grad_norm": reading.grad_norm, "loss_scale": reading.loss_scale, **named}
    tracker.event("skip", step.number, kind=guard.kind, reason=reason, tick=step.tick, **fields)
    if guard.kind == "overflow":  # routine in fp16: an overflow only lowers the loss scale
        return verdict
    if guard.kind == "recheck" and guard.recheck.found is None:  # this model's results vary: no fault
        return verdict
    # Only the first skip in a row is investigated: the others have the same cause, and each replay costs some steps. A
    # fault of the machine is always explained; a step that is taken again is no longer counted as skipped. So is a step
    # that was traced, because an earlier one could not be named.
    always = step.traced or guard.kind in ("state", "recheck") or verdict is Verdict.RESTORE
    if guard.consecutive == 1 or always or (verdict is Verdict.HALT and guard.kind != handler.newest):
        finite = all(map(math.isfinite, (reading.loss, reading.grad_norm, reading.buffers)))
        # bad inputs may make the step non-finite; a bad label does not
        incident = explain(step, "nonfinite" if guard.kind == "bad_data" and not finite else guard.kind)
        if incident is not None:
            guard.note_mistake(incident)  # so that a rollback is not repeated for the same mistake
        verdict = check_machine(step, verdict, None if incident is None else incident.cause)
        if incident is not None and not incident.known:
            newly_filed, handler.newest = incident, guard.kind
    if guard.may_keep and verdict is judged:
        verdict = keep_the_rest(step, verdict)
        guard.unfinished = None if newly_filed is None else newly_filed.path
    if newly_filed is not None or verdict is Verdict.KEEP:
        return verdict
    count = guard.skips[guard.kind]
    # a rollback or a halt prints its own message, so only plain skips are printed here
    if verdict is Verdict.SKIP and is_round(count):
        tracker.note(f"step {step.number}: {reason}; update skipped ({guard.kind}, number {count})")
    return verdict


def explain(step: ReadStep, kind: str, reading: Reading | None = None) -> IncidentSummary | None:
    """Investigates a step, and files and shows what is new; returns None if there was no investigation.

    If an error prevents it, one line says so. All ranks must call it before the next step changes the state.

    Args:
        kind: see `IncidentRequest`.
        reading: the numbers to explain; None for the step's own.
    """
    tracker = step.tracker
    try:
        filed = step.investigate(kind, step.reading if reading is None else reading)
    except NotInvestigated as error:
        tracker.event("not_investigated", step.number, tick=step.tick, kind=kind, reason=str(error))
        tracker.note(f"step {step.number}: this incident is not investigated: {error}")
        return None
    if filed is None or filed.known:
        return filed
    path = None if filed.path is None else str(Path(filed.path.parent.name, filed.path.name))
    found = {"cause": filed.cause, "verdict": filed.verdict, "fix": [*filed.fix], "path": path}
    tracker.event("incident", step.number, tick=step.tick, kind=kind, **found)
    for line in filed.lines:
        tracker.note(line)
    tracker.alert(f"incident: {filed.cause}", "\n".join(filed.lines))
    return filed


def changed_tensors(step: ReadStep) -> list[str]:
    """Returns which tensors changed between two updates, on any rank; all ranks must call it."""
    ranks = step.parallel.ranks
    whose = f"rank {ranks.rank}: " if ranks.distributed else ""
    changes = step.guard.state_check.changes(step.state.model)
    mine = [{"index": None, "what": f"{whose}{each}"} for each in changes]
    return [each["what"] for each in step.parallel.gather_samples(mine, 1)]


# ---- faults of the machine


def check_machine(step: ReadStep, verdict: Verdict, cause: str | None) -> Verdict:
    """Returns RESTORE for a held step if memory or arithmetic was at fault, and not the data or the settings.

    Args:
        verdict: the verdict so far.
        cause: the result of the investigation; None if there was none.
    """
    guard, state, reading = step.guard, step.state, step.reading
    if guard.kind not in ("nonfinite", "spike", "update"):
        return verdict
    # Weights that were not finite before the first step: no state is better, and no step can be right.
    if step.parallel.any_rank(cause == "uninitialised"):
        guard.reason = f"{guard.reason}: weights or buffers were not finite before the first step"
        return Verdict.HALT
    # Weights or moments that are not finite: every later step would be skipped, so restore an older state.
    damaged = cause == "corrupt_state" or not state_is_sound(state.model, state.optimizer)
    if step.parallel.any_rank(damaged):
        found = guard.on_machine_fault(reading.step, f"{guard.reason}: {DAMAGED}", damaged=True, otherwise=verdict)
        if found is not verdict:
            guard.kind = "state"
        return found
    # Otherwise repeat the step: on a machine without fault it gives the same bits. This costs a whole step, so it is
    # done only for the first skip in a row.
    if guard.consecutive > 1 or guard.retried_step == reading.step or not step.can_be_repeated():
        return verdict
    differs = is_finite_when_repeated(step) if reading.bad_update else step.differs_when_repeated(cause)
    if not step.parallel.any_rank(differs):
        return verdict
    return guard.on_machine_fault(reading.step, guard.reason, damaged=False, otherwise=verdict)


def is_finite_when_repeated(step: ReadStep) -> bool:
    """Repeats an optimizer's step whose update was undone; returns whether it is finite now. Restores everything."""
    model, optimizer = step.state.model, step.state.optimizer
    with put_back_after(model, optimizer):
        step.update_again()
        return update_is_finite(model, optimizer)


def confirm(step: ReadStep, verdict: Verdict) -> Verdict:
    """Returns the verdict on a step whose repetition differs: the policy's, or that of a step without a fault.

    A third computation decides. If its result equals one of the two, the hardware computed the other one wrongly. If it
    does not equal the second, and no two results were ever equal in this run, the model is at fault: its forward pass
    depends on more than weights, buffers, batch and PyTorch's random numbers, such as a file or a list that it appends
    to. The user is told once, and the limit is learnt from then on. Where bits may differ there is no third
    computation: a difference above its limit is the hardware's fault.

    Sets `found` of the policy's recheck if it is a fault, and files the incident of an update that was applied. All
    ranks must call it before the next step begins.
    """
    guard, recheck, tracker, reading = step.guard, step.guard.recheck, step.tracker, step.reading
    part = recheck.differing_part(reading)
    place = f"device {step.device} ({hardware.name(step.device)}), host {platform.node()}"
    place = f"{place}, rank {step.parallel.ranks.rank}"
    finding = blame_neighbour(step, place, collect_finding(recheck, part, place, step.gradient_again))
    part = finding.part
    if not step.parallel.any_rank(finding.differs):  # the step was computed twice for another reason
        return verdict
    # If the third equals the first and no two results ever were equal, the second run read something that the first one
    # had changed and that cannot be restored: the step itself was right.
    repeats = finding.third == "second" or recheck.has_repeated(part)
    if not step.parallel.any_rank(finding.differs and repeats):
        recheck.learn_limit(part)
        report_varying(step, part)
        return Verdict.APPLY if reading.applied else Verdict.SKIP
    # A fault of the hardware. If the update was applied, the weights are wrong: go back to before it. If not, only this
    # step's numbers are wrong: repeat the step.
    recheck.found = finding
    if not reading.applied:
        return guard.on_machine_fault(reading.step, guard.reason, damaged=False, otherwise=verdict)
    tracker.event("distrust", step.number, tick=step.tick, kind="recheck", part=part, reason=guard.reason)
    explain(step, "recheck")
    return guard.on_machine_fault(reading.step, guard.reason, damaged=True)


# ---- events and lines that both doors show


def note_taken_again(step: ReadStep) -> None:
    """Reports that a held step is taken again: its numbers were wrong and changed nothing, or samples are left out."""
    before, named = step.reading.step - 1, {}
    if step.left_out:
        named["left_out"] = step.names_of(step.left_out)
    fields = {"to": before, "loaded": before, "reason": step.guard.reason, **named}
    step.tracker.event("restore", step.number, tick=step.tick, **fields)
    if not named:  # otherwise its result is reported
        step.tracker.note(f"step {step.number}: taken again, with the same batch and learning rate")
