"""The loop around the step: cadence, verdicts, evaluation, checkpoints, signals. It decides when and computes nothing.

Each round launches the next step's `compute`, then reads what the step before it measured, and only then lets `commit`
change the weights. Whoever wants to look into a withheld step finds the weights as that step found them. The first step
of a run is read at once, and so is one after which something is due that needs to know.
"""

from collections.abc import Mapping
from typing import Any

from stabletrain.errors import Interrupted, TrainingHalted
from stabletrain.machine.signals import StopRequest
from stabletrain.parallel.failure_report import as_rank_lost
from stabletrain.records import Verdict
from stabletrain.step import commit, compute
from stabletrain.trainer.evaluate import evaluate
from stabletrain.trainer.rollback import Rollback
from stabletrain.trainer.run import UNITS, History, TrainingRun
from stabletrain.trainer.step_log import NOTHING, Launched, Throughput, report, watch


def train(job: TrainingRun) -> History:
    """Trains until `plan.steps` steps are done, and records how it ended.

    Raises:
        Interrupted: a signal came; the state is saved.
        TrainingHalted: the guard gave up; no state is saved that was not healthy.
        RankLost: another rank has ended.
    """
    tracker = job.tracker
    try:
        training_loop(job)
        job.checkpoints.wait()
    except BaseException as raised:
        error = as_rank_lost(raised, job.parallel.ranks) or raised
        job.checkpoints.finish_quietly()
        numbers = final(job)
        tracker.summary(numbers | {"status": status_of(error)})
        tracker.close(getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1))
        job.folder.finish(status_of(error), str(error) or type(error).__name__, numbers)
        job.page.write()
        if error is raised:
            raise
        raise error from raised
    finally:
        job.batches.close()
    numbers = final(job)
    job.tracker.summary(numbers | {"status": "finished"})
    job.tracker.close(0)
    reasons = [reason for reason in (job.tools.guard.trouble_at_end(), job.checkpoints.unsaved()) if reason]
    job.folder.finish("finished", "; ".join(reasons) or None, numbers)
    for reason in reasons:
        job.tracker.note(f"note     {reason}")
    return job.history


def status_of(error: BaseException) -> str:
    """The status in `run.json` of a run that ended with `error`."""
    if isinstance(error, TrainingHalted):
        return "halted"
    return "preempted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"


def final(job: TrainingRun) -> dict[str, Any]:
    """The run's last numbers, for `run.json` and W&B's summary."""
    history = job.history
    rate = history.units / max(history.seconds, 1e-9)
    return history.val | {
        "steps": job.state.step,
        "best/val_loss": history.best_loss,
        "best/step": history.best_step,
        "seconds": history.seconds,
        f"{UNITS[job.unit]}_per_s": rate,
        **job.hardware_usage.metrics(rate),
        "ticks": job.state.executed_steps,
        "guard/updates": history.updates,
        "guard/rollbacks": job.tools.guard.rollbacks,
        "guard/lost_steps": history.lost_steps,
        "guard/lost_seconds": history.lost_seconds,
        "guard/skipped": sum(job.tools.guard.skips.values()),
        "spike/score": job.rolling.metrics()["spike/score"],
        **{f"guard/skipped_{kind}": count for kind, count in job.tools.guard.skips.items()},
    }


def training_loop(job: TrainingRun) -> None:
    """The loop itself."""
    plan, state, pace, recovery = (
        job.plan,
        job.state,
        Throughput(job.history, job.parallel.ranks.world_size),
        Rollback(job),
    )
    launched: Launched | None = None
    first = state.step + 1  # whose line is there at once: somebody waits for it
    if recovery.snapshot_due(state.step):
        recovery.take_snapshot()
    with StopRequest() as stop:
        while state.step < plan.steps:
            batch = job.batches.get(state.step)
            micro_batches = batch.to(job.device).split(plan.grad_accum_steps)
            job.parallel.request_stop(stop.name)
            computed = compute(state, micro_batches, job.tools)
            if launched is not None and not settle(job, launched, pace, recovery):
                launched = None
                continue
            watching = job.monitors.due(state.step + 1, plan.steps) and computed.classes is not None
            if watching:
                seen_batch = job.tools.sanitizer.safe(micro_batches[0], computed.classes)
                job.monitors.before(state.model, state.optimizer, seen_batch, job.tools.precision)
            launched = Launched(commit(state, computed, job.tools), batch, computed.classes, computed.saved_buffers)
            pace.count(batch)
            last, stopping = state.step == plan.steps, job.parallel.stopping(stop.name)
            evaluating = last or state.step % plan.eval_every == 0
            saving = last or stopping or job.checkpoints.due(state.step)
            putting_by = recovery.snapshot_due(state.step)
            if watching or evaluating or saving or putting_by or recovery.replaying or state.step == first:
                seen = watch(job, launched) if watching else {}
                settled, launched = settle(job, launched, pace, recovery, seen), None
                if not settled:
                    continue
            if (evaluating or saving or putting_by) and not agree(job, pace, recovery):
                continue
            improved, val_loss, returning = False, None, recovery.replaying
            if evaluating or saving:
                pace.measure()
            if evaluating:
                if stopping:  # safe first: the evaluation may outlast the time that is left
                    recovery.save(None)
                    job.checkpoints.wait()
                best, val_loss = job.history.best_loss, validate(job)
                improved = val_loss < best
            if putting_by:  # after the evaluation: what it found is part of the state
                recovery.take_snapshot()
            if returning and state.step == returning.step:
                recovery.finish_replay()
            elif saving or improved:
                recovery.save(val_loss)
            if evaluating or saving:
                pace.resume()
            if stopping and not last:
                recovery.abort_replay()
                job.checkpoints.wait()
                job.tracker.event("preempt", state.step, signal=stopping)
                where = f"{stopping}: stopped after step {state.step} of {plan.steps}"
                saved = job.checkpoints.unsaved() or "the state is saved"
                if not job.checkpoints.keeps:
                    saved = "checkpoint=off: nothing is saved"
                raise Interrupted(f"{where}, {saved}", saved=job.checkpoints.keeps)


def settle(
    job: TrainingRun, launched: Launched, pace: Throughput, recovery: Rollback, seen: Mapping[str, float] = NOTHING
) -> bool:
    """Draws the consequences of a step that is over; returns whether the run goes on from the state as it is.

    Where it does not, an older state has been put back.

    Raises:
        TrainingHalted: the guard gave up.
    """
    verdict = report(job, launched, pace, seen)
    job.parallel.note_stop(launched.reading().stop)
    if job.state.step == job.plan.steps:
        verdict = job.tools.guard.at_end(verdict)
    if verdict is Verdict.APPLY:
        job.history.updates += 1
    return follow(job, verdict, pace, recovery)


def agree(job: TrainingRun, pace: Throughput, recovery: Rollback) -> bool:
    """Whether the run goes on from the state as it is, which is so where every rank still has the same one.

    Raises:
        TrainingHalted: they do not, and there is nothing to go back to.
    """
    differs = job.parallel.find_divergence(job.state)
    if not differs:
        return True
    verdict = job.tools.guard.distrust(differs)
    job.tracker.event("divergence", job.state.step, reason=differs, tick=job.state.executed_steps)
    if verdict is Verdict.APPLY:
        job.tracker.note(f"step {job.state.step}: {differs}; guard=off lets that be")
    return follow(job, verdict, pace, recovery, same_data=True)


def follow(
    job: TrainingRun, verdict: Verdict, pace: Throughput, recovery: Rollback, *, same_data: bool = False
) -> bool:
    """Puts an older state back, or halts, where the verdict says so; returns whether neither was done.

    Raises:
        TrainingHalted: the guard gave up.
    """
    if verdict is Verdict.ROLLBACK:
        pace.measure()
        recovery.roll_back(job.state.step, same_data)
        pace.resume()
    if verdict is Verdict.HALT:
        recovery.save_last_healthy()
        job.checkpoints.wait()
        job.tracker.event("halt", job.state.step, reason=job.tools.guard.reason)
        raise TrainingHalted(f"step {job.state.step}: {job.tools.guard.reason}")
    return verdict is not Verdict.ROLLBACK


def validate(job: TrainingRun) -> float:
    """Evaluates, logs, and remembers the best; returns the validation loss."""
    batches = (batch.to(job.device) for batch in job.validation())
    metrics = evaluate(job.state.model, batches, job.tools.precision, job.tools.sanitizer, job.parallel)
    if spoilt := metrics.get("val/bad_batches"):
        text = f"evaluation: {spoilt} batches hold bad data; what is bad in them is not counted"
        if not job.history.val.get("val/bad_batches"):
            job.tracker.note(f"step {job.state.step}: {text}")
        job.tracker.event("bad_validation", job.state.step, batches=spoilt)
    job.history.val, job.history.val_step = metrics, job.state.step
    if metrics["val/loss"] < job.history.best_loss:
        job.history.best_loss, job.history.best_step = metrics["val/loss"], job.state.step
        job.tracker.summary({"best/val_loss": metrics["val/loss"], "best/step": job.state.step})
    job.tracker.log(job.state.step, {"tick": job.state.executed_steps, **metrics})
    return metrics["val/loss"]
