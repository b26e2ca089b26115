"""The loop around the step: cadence, verdicts, evaluation, checkpoints, signals. It decides when and computes nothing.

Each round launches the next step's `compute`, then reads what the step before it measured, and only then lets `commit`
change the weights. Whoever wants to look into a withheld step finds the weights as that step found them.
"""

import time
from collections.abc import Mapping
from types import MappingProxyType

from stabletrain.errors import Interrupted, TrainingHalted
from stabletrain.evaluate import evaluate
from stabletrain.job import UNITS, History, Job
from stabletrain.machine.signals import StopRequest
from stabletrain.records import Batch, Reading, Verdict
from stabletrain.state.capture import capture
from stabletrain.step import InFlight, commit, compute
from stabletrain.watch.recent import Alarm

NOTHING: Mapping[str, float] = MappingProxyType({})


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


def run(job: Job) -> History:
    """Trains until `plan.steps` steps are done, and records how it ended.

    Raises:
        Interrupted: a signal came; the state is saved.
        TrainingHalted: the guard gave up; no state is saved that was not healthy.
    """
    try:
        train(job)
        job.checkpoints.wait()
    except BaseException as error:
        job.checkpoints.settle()
        job.tracker.close(getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1))
        job.folder.finish(status_of(error), str(error) or type(error).__name__, final(job))
        raise
    finally:
        job.batches.close()
    job.tracker.summary(final(job))
    job.tracker.close(0)
    job.folder.finish("finished", None, final(job))
    return job.history


def status_of(error: BaseException) -> str:
    """The status in `run.json` of a run that ended with `error`."""
    if isinstance(error, TrainingHalted):
        return "halted"
    return "preempted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"


def final(job: Job) -> dict[str, float]:
    """The run's last numbers, for `run.json` and W&B's summary."""
    history = job.history
    return history.val | {
        "steps": job.state.step,
        "best/val_loss": history.best_loss,
        "best/step": history.best_step,
        "seconds": history.seconds,
        f"{UNITS[job.unit]}_per_s": history.units / max(history.seconds, 1e-9),
        **{f"guard/skipped_{kind}": count for kind, count in job.tools.guard.skips.items()},
    }


def train(job: Job) -> None:
    """The loop itself."""
    plan, state, pace = job.plan, job.state, Pace(job.history)
    in_flight: InFlight | None = None
    with StopRequest() as stop:
        while state.step < plan.steps:
            batch = job.batches.get(state.step)
            micro_batches = batch.to(job.device).split(plan.grad_accum_steps)
            computed = compute(state, micro_batches, job.tools)
            if in_flight is not None:
                settle(job, in_flight.wait(), pace)
            watching = job.monitors.due(state.step + 1, plan.steps)
            if watching:
                job.monitors.before(state.model, state.optimizer, micro_batches[0], job.tools.precision)
            in_flight = commit(state, computed, job.tools)
            pace.count(batch)
            last, stopping = state.step == plan.steps, stop.name
            evaluating = last or state.step % plan.eval_every == 0
            saving = last or stopping or job.checkpoints.due(state.step)
            if watching or evaluating or saving:
                reading = in_flight.wait()
                settle(job, reading, pace, watch(job, reading) if watching else {})
                in_flight = None
            if evaluating or saving:
                pace.measure()
                if stopping and evaluating:  # safe first: the evaluation may outlast the time that is left
                    save(job, None)
                    job.checkpoints.wait()
                best, val_loss = job.history.best_loss, validate(job) if evaluating else None
                improved = val_loss is not None and val_loss < best
                if saving or improved:
                    save(job, val_loss)
                pace.resume()
            if stopping and not last:
                job.checkpoints.wait()
                job.tracker.event("preempt", state.step, signal=stopping)
                where = f"{stopping}: stopped after step {state.step} of {plan.steps}"
                saved = job.checkpoints.keeps
                raise Interrupted(
                    f"{where}, {'the state is' if saved else 'checkpoint=off: nothing is'} saved", saved=saved
                )


def settle(job: Job, reading: Reading, pace: Pace, seen: Mapping[str, float] = NOTHING) -> None:
    """Draws the consequences of a step that is over: the guard's verdict, the log, the progress line.

    What the monitors have `seen` of it goes into the same line of the log.
    """
    guard = job.tools.guard
    verdict = guard.judge(reading)
    raise_alarms(job, reading.step, job.recent.add(reading))
    metrics = reading_metrics(reading, sum(guard.skips.values())) | job.recent.metrics()
    if verdict is not Verdict.APPLY:
        kind = "overflow" if reading.overflow else "nonfinite"
        numbers = {"loss": reading.loss, "grad_norm": reading.grad_norm, "loss_scale": reading.loss_scale}
        job.tracker.event("skip", reading.step, kind=kind, reason=guard.reason, **numbers)
        if not reading.overflow and is_round(guard.skips[kind]):
            job.tracker.note(f"step {reading.step}: {guard.reason}; update withheld (number {guard.skips[kind]})")
    if seen or reading.step % job.plan.log_every == 0 or reading.step in (1, job.plan.steps):
        pace.measure()
        job.tracker.log(reading.step, {**metrics, f"{UNITS[job.unit]}_per_s": pace.rate, **seen})
    job.tracker.progress(reading.step, metrics, pace.rate, job.unit, sum(guard.skips.values()))
    if verdict is Verdict.HALT:
        job.tracker.event("halt", reading.step, reason=guard.reason)
        raise TrainingHalted(f"step {reading.step}: {guard.reason}")


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
    tree = capture(state, job.parts)
    job.checkpoints.save(state.step, tree, info={"run": job.folder.id}, healthy=healthy, val_loss=val_loss)
