"""The loop around the step: cadence, verdicts, evaluation, checkpoints and signals. It decides when, and computes nothing.

Each round launches the next step's `compute`, then reads what the step before it measured, and only then lets `commit`
change the weights. Whoever wants to look into a withheld step finds the weights as that step found them.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

import torch

from stabletrain.errors import Interrupted, TrainingHalted
from stabletrain.evaluate import evaluate
from stabletrain.machine.signals import StopRequest
from stabletrain.records import Batch, Reading, TrainState, Verdict
from stabletrain.state.capture import Stateful, capture
from stabletrain.state.checkpoint import Checkpoints, NoCheckpoints
from stabletrain.step import InFlight, Tools, commit, compute
from stabletrain.tracking.tracker import Tracker


@dataclass(frozen=True)
class Plan:
    """When what happens, in steps; see `conf/config.yaml`."""

    steps: int
    grad_accum_steps: int
    eval_every: int
    log_every: int


@dataclass
class History:
    """What a run remembers of itself across interruptions.

    Attributes:
        best_loss: lowest validation loss so far, nats; at `best_step`.
        val: the newest evaluation's metrics.
        seconds: training time, without evaluations and checkpoints.
        units: tokens or images consumed.
    """

    best_loss: float = math.inf
    best_step: int = 0
    val: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    units: int = 0

    def state_dict(self) -> dict:
        """For the checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        """From a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


@dataclass
class Job:
    """One run, built: what `run` needs and nothing of how it was chosen.

    Attributes:
        plan: the cadence.
        state: model, optimizer and step number.
        tools: what acts in a step.
        precision_state, ...: see `parts`.
        load: the training batch of a step number, on the host.
        validation: the batches of one evaluation, on the host.
        device: where the model lives.
        checkpoints: where states are saved.
        tracker: where numbers and events go.
        parts: everything stateful beside model and optimizer, by name.
        history: what the run remembers of itself.
    """

    plan: Plan
    state: TrainState
    tools: Tools
    load: Callable[[int], Batch]
    validation: Callable[[], Iterator[Batch]]
    device: torch.device
    checkpoints: Checkpoints | NoCheckpoints
    tracker: Tracker
    parts: Mapping[str, Stateful]
    history: History


class Pace:
    """Tokens or images a second of training: the clock stands still during evaluations and checkpoints."""

    def __init__(self) -> None:
        self._since, self._units = time.perf_counter(), 0

    def count(self, batch: Batch) -> None:
        """Counts a batch: one unit a target, so tokens for text and images for classes."""
        self._units += batch.targets.numel()

    def lap(self) -> tuple[float, int]:
        """Seconds and units since the last lap, which a new one follows."""
        now = time.perf_counter()
        lap = now - self._since, self._units
        self._since, self._units = now, 0
        return lap


def run(job: Job) -> History:
    """Trains until `plan.steps` steps are done.

    Raises:
        Interrupted: a signal came; the state is saved.
        TrainingHalted: the guard gave up; no state is saved that was not healthy.
    """
    plan, state, pace = job.plan, job.state, Pace()
    in_flight: InFlight | None = None
    with StopRequest() as stop:
        while state.step < plan.steps:
            batch = job.load(state.step)
            micro_batches = batch.to(job.device).split(plan.grad_accum_steps)
            computed = compute(state, micro_batches, job.tools)
            if in_flight is not None:
                settle(job, in_flight.wait(), pace)
            in_flight = commit(state, computed, job.tools)
            pace.count(batch)
            last = state.step == plan.steps
            evaluating = last or state.step % plan.eval_every == 0
            if evaluating or job.checkpoints.due(state.step) or stop.name:
                settle(job, in_flight.wait(), pace)
                in_flight = None
                settle_time(job, pace)
                val_loss = validate(job) if evaluating and not stop.name else None
                if job.checkpoints.due(state.step) or last or stop.name or val_loss == job.history.best_loss:
                    save(job, val_loss)
                pace.lap()
            if stop.name and not last:
                job.checkpoints.wait()
                job.tracker.event("preempt", state.step, signal=stop.name)
                raise Interrupted(f"{stop.name} after step {state.step}: the state is saved")
    job.checkpoints.wait()
    return job.history


def settle(job: Job, reading: Reading, pace: Pace) -> None:
    """Draws the consequences of a step that is over: the guard's verdict, the log, the progress line."""
    guard = job.tools.guard
    verdict = guard.judge(reading)
    skipped = sum(guard.skips.values())
    if verdict is not Verdict.APPLY:
        kind = "overflow" if reading.overflow else "nonfinite"
        job.tracker.event(
            "skip",
            reading.step,
            kind=kind,
            reason=guard.reason,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
        )
        if not reading.overflow and is_round(guard.skips.get(kind, 0)):
            job.tracker.note(
                f"step {reading.step}: {guard.reason}; the update was withheld (skip {guard.skips[kind]})"
            )
    if reading.step % job.plan.log_every == 0 or reading.step in (1, job.plan.steps):
        seconds, units = settle_time(job, pace)
        rate = units / seconds if seconds > 0 else 0.0
        job.tracker.log(
            reading.step, reading_metrics(reading, skipped) | {f"{job.tracker.unit}s_per_s": rate}
        )
        job.tracker.progress(reading, rate, skipped)
    if verdict is Verdict.HALT:
        job.tracker.event("halt", reading.step, reason=guard.reason)
        raise TrainingHalted(f"step {reading.step}: {guard.reason}")


def settle_time(job: Job, pace: Pace) -> tuple[float, int]:
    """Adds the lap to the history."""
    seconds, units = pace.lap()
    job.history.seconds += seconds
    job.history.units += units
    return seconds, units


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


def validate(job: Job) -> float:
    """Evaluates, logs, and remembers the best; returns the validation loss."""
    batches = (batch.to(job.device) for batch in job.validation())
    metrics = evaluate(job.state.model, batches, job.tools.precision)
    job.history.val = metrics
    if metrics["val/loss"] < job.history.best_loss:
        job.history.best_loss, job.history.best_step = metrics["val/loss"], job.state.step
    job.tracker.log(job.state.step, metrics)
    return metrics["val/loss"]


def save(job: Job, val_loss: float | None) -> None:
    """Takes a checkpoint of everything stateful; it counts as healthy while no step is being skipped."""
    state = job.state
    healthy = getattr(job.tools.guard, "consecutive", 0) == 0
    job.checkpoints.save(
        state.step, capture(state, job.parts), info=job.tracker.identity, healthy=healthy, val_loss=val_loss
    )
