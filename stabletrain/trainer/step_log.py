"""Logs an executed step: its metrics, and the progress line."""

from collections.abc import Mapping
from types import MappingProxyType

from stabletrain.guard.policy import NoGuard
from stabletrain.records import Reading
from stabletrain.trainer.history import UNITS, Throughput
from stabletrain.trainer.run import TrainingRun
from stabletrain.trainer.saved_states import HealingHistory

NOTHING: Mapping[str, float] = MappingProxyType({})


def log_step(run: TrainingRun, reading: Reading, throughput: Throughput, seen: Mapping[str, float]) -> None:
    """Updates the progress line. Logs the step's metrics if they are due or if monitors returned any (`seen`)."""
    guard, tracker, plan = run.tools.guard, run.tracker, run.plan
    skipped = sum(guard.skips.values())
    metrics = reading_metrics(reading, skipped) | run.monitoring.rolling.metrics()
    metrics |= {
        "tick": run.state.executed_steps,
        "guard/applied": int(reading.applied),
        "guard/rollbacks": guard.rollbacks,
        **healing_counts(guard, run.saved.healing),
    }
    if seen or reading.step % plan.log_every == 0 or reading.step in (1, plan.steps):
        throughput.measure()
        used = {f"{UNITS[run.data.unit]}_per_s": throughput.rate, **run.monitoring.usage.metrics(throughput.rate)}
        tracker.log(reading.step, {**metrics, **used, **seen})
    tracker.progress(reading.step, metrics, throughput.rate, run.data.unit, skipped)


def healing_counts(guard: NoGuard, healing: HealingHistory) -> dict[str, int]:
    """Returns the number of healings so far; empty without `guard.escalate=whatif`."""
    return {"guard/healings": len(healing.healed_by)} if guard.escalate == "whatif" else {}


def reading_metrics(reading: Reading, skipped: int) -> dict[str, float]:
    """Returns a reading's numbers under their names in `metrics.jsonl`."""
    return {
        "train/loss": reading.loss,
        **{f"train/{name}": value for name, value in reading.terms.items()},
        "grad/norm": reading.grad_norm,
        "clip/coef": reading.clip_coef,
        "lr": reading.lr,
        "precision/loss_scale": reading.loss_scale,
        "guard/skipped": skipped,
    }
