"""From a withheld step, or an alarm, to the incident handler: which steps are investigated, and what that needs."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from stabletrain.forensics.probes.samples import MOST, bad_samples, describe
from stabletrain.forensics.repro import Repro, is_scaled
from stabletrain.machine.compiling import compiled_shape
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Batch, Reading, Verdict
from stabletrain.step import InFlight
from stabletrain.trainer.run import TrainingRun

FAR = 1_000_003
"""Steps ahead of a step, times its number, from where a batch is taken that the run has not read and never will."""


class ExecutedStep(NamedTuple):
    """A step that was committed, with what investigating it needs.

    Attributes:
        in_flight: its reading, on the way to the host.
        batch: what it was computed from, on the host.
        classes: the last dimension of its logits; None if there was nothing to run.
        saved_buffers: the model's buffers before it; the next step's forward overwrites the live ones.
    """

    in_flight: InFlight
    batch: Batch
    classes: int | None
    saved_buffers: list[Tensor]

    def reading(self) -> Reading:
        """The step's numbers; waits for them."""
        return self.in_flight.wait()


def investigate_skip(run: TrainingRun, executed: ExecutedStep, reading: Reading, verdict: Verdict) -> None:
    """Records a step whose update was withheld; investigates the first of several in a row.

    The last of them is investigated too if it ends the run for another reason than the first was withheld for. Steps
    that are not investigated are mentioned now and then, unless a graver verdict is reported anyway.
    """
    guard, tracker = run.tools.guard, run.rollback.tracker
    reason, samples = guard.reason, {}
    if guard.kind == "bad_data":
        mine = bad_samples(executed.batch, run.tools.sanitizer.vocab_size, executed.classes)
        bad = run.parallel.gather_samples(mine, len(executed.batch))[:MOST]
        reason, samples = describe(bad), {"samples": bad}
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
    if guard.kind == "overflow":  # fp16's routine overflow calibrates the loss scale and is no incident
        return
    handler = run.forensics.handler
    if guard.consecutive == 1 or (verdict is Verdict.HALT and guard.kind != handler.newest):
        kind = "spike" if guard.kind == "spike" else "nonfinite"
        if handle_incident(run, executed, reading, kind):
            handler.newest = guard.kind
            return
    number = guard.skips[guard.kind]
    if verdict is Verdict.SKIP and is_round(number):
        tracker.note(f"step {reading.step}: {reason}; update withheld ({guard.kind}, number {number})")


def investigate_alarm(run: TrainingRun, executed: ExecutedStep, reading: Reading, alarms: Sequence[Alarm]) -> None:
    """Investigates an applied step in which gradients vanish, if fp16 may be the reason."""
    vanishing = run.parallel.any_rank(any(alarm.kind == "vanishing" for alarm in alarms))
    if vanishing and reading.applied and is_scaled(run.tools.precision):
        handle_incident(run, executed, reading, "loss_scale")


def handle_incident(run: TrainingRun, executed: ExecutedStep, reading: Reading, kind: str) -> bool:
    """Has a step investigated; returns whether an incident was filed and shown."""
    tracker = run.rollback.tracker
    filed = run.forensics.handler.handle(
        lambda deadline: make_repro(run, executed, reading, deadline),
        kind,
        classes=executed.classes,
        optimizer=run.state.optimizer if run.parallel.has_whole_moments else None,
        limits=run.tools.guard.bounds,
    )
    if filed is None:
        return False
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
    return True


def make_repro(run: TrainingRun, executed: ExecutedStep, reading: Reading, deadline: float) -> Repro | None:
    """All that running the step again needs; None if this rank has no room for it.

    A withheld step has left everything as it found it. The state before an applied step is gone: its batch is run on
    the weights and buffers that the step has made, before the next step touches them.
    """
    model = run.parallel.full_model(run.state.model, run.forensics.model_factory)
    older = run.parallel.full_state(run.rollback.older_state(reading.step - 2))
    if model is None:
        return None
    return Repro(
        model=model,
        buffers=[*run.state.model.buffers()] if reading.applied else executed.saved_buffers,
        step=reading.step - 1,
        batch=executed.batch,
        micro_batches=run.plan.grad_accum_steps,
        tools=run.tools,
        loss_scale=reading.loss_scale,
        device=run.device,
        reading=reading,
        compiled_for=compiled_shape(model),
        applied=reading.applied,
        older=lambda: older,
        fresh=lambda: run.data.load(FAR * (reading.step + 1)),
        deadline=deadline,
        metadata=run.forensics.metadata,
    )


def is_round(count: int) -> bool:
    """1, 2, 3, 10, 100, 1000 ...: how often the same line is worth reading."""
    return count <= 3 or count in (10**power for power in range(1, 9))
