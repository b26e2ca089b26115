"""What a run reports: the metrics of each step, the final metrics, and remarks on a run that has finished.

A remark is made although nothing went wrong that a step could show:

| remark | if |
|---|---|
| no progress | the median of the last training losses is not below that of the first ones |
| worse than its best | the final validation loss is above the best by more than its noise |

A run whose updates were all withheld has not trained: it has halted.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.checkpoint.reader import UnusableCheckpoint
from stabletrain.errors import Interrupted, TrainingHalted
from stabletrain.guard.policy import NoGuard
from stabletrain.guard.policy.slow import validation_bound
from stabletrain.monitors.change_point import median
from stabletrain.records import Reading
from stabletrain.trainer.history import ENDS, UNITS, HealingHistory, History, Throughput
from stabletrain.trainer.run import TrainingRun

NOTHING: Mapping[str, float] = MappingProxyType({})


def log_findings(run: TrainingRun) -> None:
    """Looks at the run before its first step (`check=first_step`), and logs what is wrong or unusual."""
    for found in run.monitoring.preflight.look(run):
        run.tracker.event(
            "check", run.state.step, verdict=found.verdict, check=found.check, text=found.text, places=[*found.places]
        )
        fix = f"; fix: {found.fix}" if found.fix else ""
        run.tracker.note(f"{found.verdict:<8} {found.check}: {found.text}{fix}")


def log_step(run: TrainingRun, reading: Reading, throughput: Throughput, seen: Mapping[str, float]) -> None:
    """Updates the progress line. Logs the step's metrics if they are due or if monitors returned any (`seen`).

    Those of a step that was applied without some samples are always due.
    """
    guard, tracker, plan = run.tools.guard, run.tracker, run.plan
    skipped = sum(guard.skips.values())
    metrics = reading_metrics(reading, skipped)
    if seen or guard.left_out or reading.step % plan.log_every == 0 or reading.step in (1, plan.steps):
        throughput.measure()
        run.monitoring.meter.sample()
        counted = {
            "tick": run.state.executed_steps,
            "guard/applied": int(reading.applied),
            "guard/rollbacks": guard.rollbacks,
            **healing_counts(guard, run.saved.healing),
            **({"guard/left_out": guard.left_out} if guard.keeps else {}),
        }
        used = {f"{UNITS[run.data.unit]}_per_s": throughput.rate, **run.monitoring.usage.metrics(throughput.rate)}
        tracker.log(reading.step, {**metrics, **run.monitoring.rolling.metrics(), **counted, **used, **seen})
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


def remarks(history: History, best: Path | None) -> list[str]:
    """Returns one line for each remark on a finished run.

    Args:
        best: the checkpoint with the lowest validation loss; None if there is none.
    """
    found = []
    first, last = history.first_losses, history.last_losses
    if history.updates >= 2 * ENDS and len(first) == len(last) == ENDS and median(last) >= median(first):
        found.append(
            f"no progress: the training loss of the last {ENDS} steps, {median(last):.4g}, is not below that of the "
            f"first {ENDS}, {median(first):.4g}; fix: another optimizer.lr"
        )
    losses = [loss for loss in history.val_losses if math.isfinite(loss)]
    if len(losses) >= 2:
        bound = validation_bound(losses[:-1])
        if losses[-1] > min(losses) + bound:
            where = f"; its checkpoint: {best}" if best is not None else ""
            found.append(
                f"the final validation loss {losses[-1]:.4g} is above the best, {min(losses):.4g} at step "
                f"{history.best_step}, by more than its noise ({bound:.2g}){where}"
            )
    return found


def best_path(checkpoints: NoCheckpoints) -> Path | None:
    """Returns the checkpoint with the lowest validation loss; None without one, or if it cannot be read any more.

    A run that has finished stays finished: it may be deleted or damaged while this rank looks at it.
    """
    try:
        best = checkpoints.best()
    except (UnusableCheckpoint, OSError):
        return None
    return None if best is None else best.path


def check_updated(step: int, history: History, guard: NoGuard) -> None:
    """Checks that a run which has done all its steps has trained at all.

    Raises:
        TrainingHalted: no update was applied.
    """
    if step and not history.updates:
        raise TrainingHalted(f"step {step}: no update was applied; the last reason: {guard.reason or 'unknown'}")


def final_metrics(run: TrainingRun) -> dict[str, Any]:
    """Returns the final metrics for `run.json` and W&B's summary."""
    history, guard, monitoring = run.history, run.tools.guard, run.monitoring
    rate, healing = history.units / max(history.seconds, 1e-9), run.saved.healing
    healings = healing_counts(guard, healing)
    return history.val | {
        "steps": run.state.step,
        "best/val_loss": history.best_loss,
        "best/step": history.best_step,
        "seconds": history.seconds,
        f"{UNITS[run.data.unit]}_per_s": rate,
        **monitoring.usage.metrics(rate),
        **monitoring.meter.metrics(),
        "ticks": run.state.executed_steps,
        "guard/updates": history.updates,
        "guard/rollbacks": guard.rollbacks,
        "guard/machine_faults": guard.machine_faults,
        **healings,
        **({"guard/whatif_steps": healing.whatif_steps} if healings else {}),
        **(
            {"guard/kept_steps": guard.kept_steps, "guard/samples_left_out": guard.samples_left_out}
            if guard.keeps
            else {}
        ),
        "guard/lost_steps": history.lost_steps,
        "guard/lost_seconds": history.lost_seconds,
        "guard/skipped": sum(guard.skips.values()),
        "spike/score": monitoring.rolling.metrics()["spike/score"],
        **{f"guard/skipped_{kind}": count for kind, count in guard.skips.items()},
    }


def status_of(error: BaseException) -> str:
    """Returns the status for `run.json` of a run that ended with `error`."""
    if isinstance(error, TrainingHalted):
        return "halted"
    return "preempted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
