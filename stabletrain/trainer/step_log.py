"""What a step that is over leaves behind: the guard's verdict, lines of the log, alarms, the progress line."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from stabletrain.forensics.probes.samples import MOST, bad_samples, describe
from stabletrain.forensics.repro import Repro, is_scaled
from stabletrain.machine.compiling import shape_of
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Batch, Reading, Verdict
from stabletrain.step import InFlight
from stabletrain.trainer.run import UNITS, History, TrainingRun

FAR = 1_000_003
"""Steps ahead of a step, times its number, from where a batch is taken that the run has not read and never will."""

NOTHING: Mapping[str, float] = MappingProxyType({})


class Launched(NamedTuple):
    """A step whose numbers are on their way.

    Attributes:
        in_flight: the reading.
        batch: what it was computed from, on the host.
        classes: the last dimension of its logits; None if there was nothing to run.
        saved_buffers: the model's buffers from before it; by the time it is looked at, the next step has written them.
    """

    in_flight: InFlight
    batch: Batch
    classes: int | None
    saved_buffers: list[Tensor]

    def reading(self) -> Reading:
        """The numbers, once they are there."""
        return self.in_flight.wait()


class Throughput:
    """Tokens or images a second of training: the clock stands still during evaluations and checkpoints.

    Attributes:
        rate: units a second over the last stretch.
    """

    def __init__(self, history: History, ranks: int = 1) -> None:
        self.rate = 0.0
        self._ranks = ranks
        self._history = history
        self._since, self._units = time.perf_counter(), 0

    def count(self, batch: Batch) -> None:
        """Counts a batch, and the other ranks' parts: one unit a target, so tokens for text and images for classes."""
        self._units += batch.targets.numel() * self._ranks

    def measure(self) -> None:
        """Ends a stretch, adds it to the history, and begins the next."""
        now = time.perf_counter()
        seconds = now - self._since
        self.rate = self._units / seconds if seconds > 0 else 0.0
        self._history.seconds += seconds
        self._history.units += self._units
        self._since, self._units = now, 0

    def resume(self) -> None:
        """Begins a stretch now: what lies between the last one and now was no training."""
        self._since = time.perf_counter()


def report(job: TrainingRun, launched: Launched, pace: Throughput, seen: Mapping[str, float] = NOTHING) -> Verdict:
    """The guard's verdict on a step that is over, and everything that is said about it.

    What the monitors have `seen` of it goes into the same line of the log.
    """
    reading, guard = launched.reading(), job.tools.guard
    verdict = guard.judge(reading)
    skipped = sum(guard.skips.values())
    raise_alarms(job, reading.step, job.rolling.add(reading))
    metrics = reading_metrics(reading, skipped) | job.rolling.metrics()
    metrics |= {
        "tick": job.state.executed_steps,
        "guard/applied": int(reading.applied),
        "guard/rollbacks": guard.rollbacks,
    }
    if not reading.applied:
        report_skip(job, launched, reading, verdict)
    if seen or reading.step % job.plan.log_every == 0 or reading.step in (1, job.plan.steps):
        pace.measure()
        used = {f"{UNITS[job.unit]}_per_s": pace.rate, **job.hardware_usage.metrics(pace.rate)}
        job.tracker.log(reading.step, {**metrics, **used, **seen})
    job.tracker.progress(reading.step, metrics, pace.rate, job.unit, skipped)
    return verdict


def report_skip(job: TrainingRun, launched: Launched, reading: Reading, verdict: Verdict) -> None:
    """Records a step whose update was withheld, and says so now and then, unless a graver verdict tells it anyway.

    The first of a row is explained, and the last where it ends the run for another reason than it began with.
    """
    guard = job.tools.guard
    numbers = {"loss": reading.loss, "grad_norm": reading.grad_norm, "loss_scale": reading.loss_scale}
    reason, samples = guard.reason, {}
    if guard.kind == "bad_data":
        mine = bad_samples(launched.batch, job.tools.sanitizer.vocab_size, launched.classes)
        bad = job.parallel.gather_samples(mine, len(launched.batch))[:MOST]
        reason, samples = describe(bad), {"samples": bad}
    job.tracker.event(
        "skip", reading.step, kind=guard.kind, reason=reason, tick=job.state.executed_steps, **numbers, **samples
    )
    kind = "spike" if guard.kind == "spike" else "nonfinite"
    telling = guard.consecutive == 1 or (verdict is Verdict.HALT and guard.kind != job.forensics.newest)
    if guard.kind != "overflow" and telling and handle_incident(job, launched, reading, kind):
        job.forensics.newest = guard.kind
        return
    if verdict is Verdict.SKIP and guard.kind != "overflow" and is_round(guard.skips[guard.kind]):
        number = guard.skips[guard.kind]
        job.tracker.note(f"step {reading.step}: {reason}; update withheld ({guard.kind}, number {number})")


def handle_incident(job: TrainingRun, launched: Launched, reading: Reading, kind: str) -> bool:
    """Has a step explained; returns whether that was done, and said."""
    filed = job.forensics.handle(
        lambda deadline: make_repro(job, launched, reading, deadline),
        kind,
        classes=launched.classes,
        optimizer=job.state.optimizer if job.parallel.has_whole_moments else None,
        limits=job.tools.guard.bounds,
    )
    if filed is None:
        return False
    where = None if filed.path is None else f"incidents/{filed.path.name}"
    about = {"kind": kind, "cause": filed.cause, "verdict": filed.verdict, "fix": list(filed.fix), "path": where}
    job.tracker.event("incident", reading.step, tick=job.state.executed_steps, **about)
    for line in filed.lines:
        job.tracker.note(line)
    job.tracker.alert(f"incident: {filed.cause}", "\n".join(filed.lines))
    return True


def make_repro(job: TrainingRun, launched: Launched, reading: Reading, deadline: float) -> Repro | None:
    """What running the step again needs; None where this rank has no room for it.

    Of one that was withheld all is as it was when it started. What one that was applied started from is gone: the same
    batch is run on the weights, with the buffers, that it has made, before the next step has touched them.
    """
    model = job.parallel.full_model(job.state.model, job.model_factory)
    older = job.parallel.full_state(job.snapshots.newest(reading.step - 2))
    if model is None:
        return None
    return Repro(
        model=model,
        buffers=[*job.state.model.buffers()] if reading.applied else launched.saved_buffers,
        step=reading.step - 1,
        batch=launched.batch,
        micro_batches=job.plan.grad_accum_steps,
        tools=job.tools,
        loss_scale=reading.loss_scale,
        device=job.device,
        reading=reading,
        compiled_for=shape_of(model),
        applied=reading.applied,
        older=lambda: older,
        fresh=lambda: job.load(FAR * (reading.step + 1)),
        deadline=deadline,
        metadata=job.metadata,
    )


def watch(job: TrainingRun, launched: Launched) -> dict[str, float]:
    """What the monitors saw of the step that is just over; where gradients vanish in fp16, whether fp16 is to blame."""
    reading = launched.reading()
    metrics, alarms = job.monitors.after(job.state.model, job.state.optimizer, reading.applied)
    raise_alarms(job, reading.step, alarms)
    vanishing = job.parallel.any_rank(any(alarm.kind == "vanishing" for alarm in alarms))
    if vanishing and reading.applied and is_scaled(job.tools.precision):
        handle_incident(job, launched, reading, "loss_scale")
    return metrics


def raise_alarms(job: TrainingRun, step: int, alarms: list[Alarm]) -> None:
    """Records each alarm, shows it, and sends it to whoever is not watching."""
    for alarm in alarms:
        job.tracker.event("alarm", step, kind=alarm.kind, text=alarm.text)
        job.tracker.note(f"step {step}: {alarm.text}")
        job.tracker.alert(alarm.kind, f"step {step}: {alarm.text}")


def is_round(count: int) -> bool:
    """1, 2, 3, 10, 100, 1000 ...: how often a person wants to read the same line."""
    return count <= 3 or count in (10**power for power in range(1, 9))


def reading_metrics(reading: Reading, skipped: int) -> dict[str, float]:
    """A reading under the names of `metrics.jsonl`."""
    return {
        "train/loss": reading.loss,
        "train/ce": reading.ce,
        "train/zloss": reading.zloss,
        "grad/norm": reading.grad_norm,
        "clip/coef": reading.clip_coef,
        "lr": reading.lr,
        "precision/loss_scale": reading.loss_scale,
        "guard/skipped": skipped,
    }
