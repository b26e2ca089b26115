"""What a step that is over leaves behind: the guard's verdict, lines of the log, alarms, the progress line."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from stabletrain.forensics.samples import bad_samples, describe
from stabletrain.job import UNITS, History, Job
from stabletrain.records import Batch, Reading, Verdict
from stabletrain.step import InFlight
from stabletrain.watch.recent import Alarm

NOTHING: Mapping[str, float] = MappingProxyType({})


class Launched(NamedTuple):
    """A step whose numbers are on their way.

    Attributes:
        in_flight: the reading.
        batch: what it was computed from, on the host.
        classes: the last dimension of its logits; None if there was nothing to run.
    """

    in_flight: InFlight
    batch: Batch
    classes: int | None

    def reading(self) -> Reading:
        """The numbers, once they are there."""
        return self.in_flight.wait()


class Pace:
    """Tokens or images a second of training: the clock stands still during evaluations and checkpoints.

    Attributes:
        rate: units a second over the last stretch.
    """

    def __init__(self, history: History) -> None:
        self.rate = 0.0
        self._history = history
        self._since, self._units = time.perf_counter(), 0

    def count(self, batch: Batch) -> None:
        """Counts a batch: one unit a target, so tokens for text and images for classes."""
        self._units += batch.targets.numel()

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


def report(job: Job, launched: Launched, pace: Pace, seen: Mapping[str, float] = NOTHING) -> Verdict:
    """The guard's verdict on a step that is over, and everything that is said about it.

    What the monitors have `seen` of it goes into the same line of the log.
    """
    reading, guard = launched.reading(), job.tools.guard
    verdict = guard.judge(reading)
    skipped = sum(guard.skips.values())
    raise_alarms(job, reading.step, job.recent.add(reading))
    metrics = reading_metrics(reading, skipped) | job.recent.metrics()
    metrics |= {"tick": job.state.tick, "guard/applied": int(reading.applied), "guard/rollbacks": guard.rollbacks}
    if not reading.applied:
        report_skip(job, launched, reading, told=verdict is not Verdict.SKIP)
    if seen or reading.step % job.plan.log_every == 0 or reading.step in (1, job.plan.steps):
        pace.measure()
        job.tracker.log(reading.step, {**metrics, f"{UNITS[job.unit]}_per_s": pace.rate, **seen})
    job.tracker.progress(reading.step, metrics, pace.rate, job.unit, skipped)
    return verdict


def report_skip(job: Job, launched: Launched, reading: Reading, *, told: bool) -> None:
    """Records a step whose update was withheld, and says so now and then, unless a graver verdict tells it anyway."""
    guard = job.tools.guard
    numbers = {"loss": reading.loss, "grad_norm": reading.grad_norm, "loss_scale": reading.loss_scale}
    reason, samples = guard.reason, {}
    if guard.kind == "bad_data":
        bad = bad_samples(launched.batch, job.tools.intake.vocab_size, launched.classes)
        reason, samples = describe(bad), {"samples": bad}
    job.tracker.event("skip", reading.step, kind=guard.kind, reason=reason, tick=job.state.tick, **numbers, **samples)
    if not told and guard.kind != "overflow" and is_round(guard.skips[guard.kind]):
        number = guard.skips[guard.kind]
        job.tracker.note(f"step {reading.step}: {reason}; update withheld ({guard.kind}, number {number})")


def watch(job: Job, reading: Reading) -> dict[str, float]:
    """What the monitors saw of the step that is just over."""
    metrics, alarms = job.monitors.after(job.state.model, job.state.optimizer, reading.applied)
    raise_alarms(job, reading.step, alarms)
    return metrics


def raise_alarms(job: Job, step: int, alarms: list[Alarm]) -> None:
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
