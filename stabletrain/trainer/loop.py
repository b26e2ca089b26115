"""The training loop: when to step, judge, evaluate, save and stop. It computes nothing itself.

Each iteration launches `compute` of the next step, then reads the numbers of the previous step, and only then runs
`commit`, which changes the weights. So the device never waits for the host. If the previous step was skipped, it can be
investigated, because the weights still have their values from before that step. The numbers of a step are read in the
same iteration if they are needed: before an evaluation, a snapshot or a checkpoint, when monitors inspect the step, and
for the first step of a process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stabletrain.buffers import buffers_of
from stabletrain.errors import Interrupted, TrainingHalted
from stabletrain.extension import NoForecast
from stabletrain.forensics.probes.underflow import can_underflow
from stabletrain.guard.checks.update_check import replays_exactly
from stabletrain.guard.checks.written import note_start
from stabletrain.guard.engine import changed_tensors, explain, note_taken_again, settle
from stabletrain.guard.policy.limits import BAD_UPDATE, CHANGED
from stabletrain.guard.reports import log_alarms, log_predictions
from stabletrain.machine.signals import NoStopRequest, StopRequest
from stabletrain.parallel.failure_report import as_rank_lost
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Reading, Verdict
from stabletrain.step import commit
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.evaluate import validate
from stabletrain.trainer.history import History, Throughput
from stabletrain.trainer.incidents import ExecutedStep, StepOfRun, compute_twice, rehearse
from stabletrain.trainer.reports import (
    NOTHING,
    best_path,
    check_updated,
    final_metrics,
    log_findings,
    log_step,
    reading_metrics,
    remarks,
    status_of,
)
from stabletrain.trainer.run import TrainingRun


def train(run: TrainingRun, signals: StopRequest | NoStopRequest | None = None) -> History:
    """Trains for `plan.steps` steps, and records how the run ended.

    Args:
        run: the run, restored and ready.
        signals: asks the run to stop; by default the signals of `StopRequest`.

    Raises:
        Interrupted: a signal arrived; the state is saved.
        TrainingHalted: the guard gave up; the newest healthy state is saved. Or no update was applied.
        RankLost: another rank died.
    """
    tracker, checkpoints = run.output.tracker, run.saved.checkpoints
    try:
        training_loop(run, signals or StopRequest())
        # Checkpoints are written in the background: wait for the last one.
        checkpoints.wait()
        check_updated(run.state.step, run.history, run.tools.guard)
    except BaseException as raised:
        # A rank that dies closes its sockets, so the others fail with an error about sockets: find the real one.
        error = as_rank_lost(raised, run.parallel.ranks) or raised
        # Record how the run ended, whatever the reason was.
        checkpoints.finish_quietly()
        numbers = final_metrics(run)
        tracker.summary(numbers | {"status": status_of(error)})
        tracker.close(getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1))
        run.output.folder.finish(status_of(error), str(error) or type(error).__name__, numbers)
        run.output.page.write()
        if error is raised:
            raise
        raise error from raised
    finally:
        run.data.batches.close()
    # The run has finished: its result, and remarks on what no single step could show.
    numbers = final_metrics(run)
    tracker.summary(numbers | {"status": "finished"})
    tracker.close(0)
    reasons = [reason for reason in (run.tools.guard.trouble_at_end(), checkpoints.unsaved()) if reason]
    said = remarks(run.history, best_path(checkpoints))
    run.output.folder.finish("finished", "; ".join(reasons) or None, numbers, said)
    for line in (*reasons, *said):
        tracker.note(f"note     {line}")
    return run.history


def training_loop(run: TrainingRun, stop_request: StopRequest | NoStopRequest) -> None:
    """Runs the steps: each iteration computes one step, judges the step before it, and commits this one."""
    plan, state, guard, tools = run.plan, run.state, run.tools.guard, run.tools
    saved, rollback, monitors = run.saved, run.rollback, run.monitoring.monitors
    throughput = Throughput(run.history, run.parallel.ranks.world_size)
    executed: ExecutedStep | None = None  # the step committed in the last iteration, if it is not judged yet
    repeating = False  # whether the next step is repeated after a fault of the machine
    first = state.step + 1
    can_replay = replays_exactly(state.model, state.optimizer, run.device)
    # What is wrong with parameters, groups, data or numbers is said before the first step.
    log_findings(run)
    note_start(state.model, state.optimizer)
    rehearse(guard.recheck, state.step, plan.steps)
    # The guard needs one state to go back to before the first update.
    if saved.snapshot_due(state.step):
        saved.take_snapshot()
    with stop_request as signals:
        while state.step < plan.steps:
            # Data first: batch number `state.step`, prefetched by another thread while the last step ran.
            batch = run.data.batch(state.step)
            micro_batches = run.data.to_device(batch).split(plan.grad_accum_steps)
            # The ranks' flags travel with this step's numbers, so that all ranks stop after the same step.
            run.parallel.request_stop(signals)
            # Launch forward and backward of this step before reading the last step's numbers: the device never waits.
            # A step that is repeated after a fault of the machine is computed twice: both results must be equal.
            twice, repeating = repeating, False
            if twice:
                computed = compute_twice(state, micro_batches, tools, run.device)
            else:
                computed = run.compute(state, micro_batches, tools)
            if executed is not None:
                # Judge the last step, now that the device is busy. Its weights are still in place if it was skipped, so
                # it can be investigated. If an older state was restored, the gradients just computed are of a state
                # that no longer exists: start over from the restored one.
                if not judge_step(run, executed, throughput):
                    executed, repeating = None, guard.retried_step == state.step + 1
                    continue
                if executed.in_flight.recomputed:  # an investigation has overwritten this step's gradients
                    computed = run.compute(state, micro_batches, tools)
            # Monitors inspect raw gradients, and weights before and after the update, so they go around `commit`.
            watching = monitors.due(state.step + 1, plan.steps) and computed.forwards > 0
            if watching:
                safe_batch = tools.sanitizer.safe(micro_batches[0], computed.classes)
                monitors.before(state.model, state.optimizer, safe_batch, tools.precision, tools.objective)
            # If a replay from a snapshot in memory can undo a bad update, nothing is copied before it is applied.
            check = guard.update_check
            check.copies = check.failed or not (can_replay and saved.snapshots.reaches(state.step))
            # Clip and update, or skip. The numbers are copied to the host in the background.
            in_flight = commit(state, computed, tools)
            executed = ExecutedStep(in_flight, batch, computed.classes, computed.saved_buffers)
            throughput.count(batch)
            # Most steps end here, and are judged in the next iteration. The others are judged now, because their
            # numbers or the state that they led to are needed.
            due = due_after_step(run, watching or in_flight.undone, signals, first)
            if not due.reading:
                continue
            if state.step == first:
                executed.reading()  # every rank has contributed to it, so all of them have done their first step
                run.parallel.set_timeout(started=True)
            watching = watching and not executed.reading().bad_update
            seen = run_monitors(run, executed) if watching else NOTHING
            judged, executed = executed, None
            if not judge_step(run, judged, throughput, seen):
                repeating = guard.retried_step == state.step + 1
                continue
            if watching:
                due = log_forecast(run.monitoring.forecast, run.tracker, run.parallel, judged.reading(), seen, due)
            # A replay has reached its state. If that state is still to be evaluated and saved, this happens below.
            if rollback.reached_unused_state:
                rollback.finish_replay()
            if not due.state_is_used:
                rollback.finish_replay_at(state.step)
                continue
            # Evaluate or save a state only after its step was judged, only if nothing has changed it since, and only if
            # all ranks have the same: a damaged state on disk would be worse than none.
            if state_is_unchanged(run, judged, throughput) and replicas_agree(run, throughput):
                use_state(run, due, judged, throughput)


@dataclass(frozen=True)
class Due:
    """What is due after a step.

    Attributes:
        evaluate, save, snapshot: evaluate the state, write a checkpoint, take a snapshot.
        stop: name of the signal for which all ranks stop now; empty for none.
        reading: whether the step's numbers are needed before the next step is launched.
    """

    evaluate: bool
    save: bool
    snapshot: bool
    stop: str
    reading: bool

    @property
    def state_is_used(self) -> bool:
        """Whether the state is evaluated or kept, so that the ranks' replicas must be equal."""
        return self.evaluate or self.save or self.snapshot


def due_after_step(run: TrainingRun, watching: bool, signals: StopRequest | NoStopRequest, first: int) -> Due:
    """Returns what is due after the step that was just committed.

    Args:
        run: with `state.step` steps done.
        watching: whether monitors inspect this step.
        signals: asks this rank, or all ranks, to stop.
        first: first step of this process, whose progress line the user is waiting for.
    """
    step = run.state.step
    last, stop = step == run.plan.steps, signals.agreed or run.parallel.stopping(signals.name)
    evaluate_now = last or step % run.plan.eval_every == 0
    save = last or bool(stop) or run.saved.checkpoints.due(step)
    snapshot = run.saved.snapshot_due(step)
    reading = watching or evaluate_now or save or snapshot or bool(run.rollback.replaying) or step == first
    reading = reading or run.tools.guard.recheck.due(step - 1)
    return Due(evaluate_now, save, snapshot, stop, reading)


def run_monitors(run: TrainingRun, executed: ExecutedStep) -> dict[str, float]:
    """Returns the monitors' metrics of the step, and logs their alarms; investigates vanishing gradients."""
    reading = executed.reading()
    metrics, alarms = run.monitoring.monitors.after(run.state.model, run.state.optimizer, reading.applied)
    log_alarms(run.tracker, reading.step, alarms)
    # fp16 and fp8 can lose gradients that vanish. Each rank sees only its own part of the gradients, but all ranks must
    # take part in an investigation.
    vanishing = run.parallel.any_rank(any(alarm.kind == "vanishing" for alarm in alarms))
    if vanishing and reading.applied and can_underflow(run.tools.precision):
        explain(StepOfRun(run, executed), "loss_scale")
    return metrics


def log_forecast(
    forecast: NoForecast,
    tracker: NoTracker,
    parallel: SingleProcess,
    reading: Reading,
    seen: Mapping[str, float],
    due: Due,
) -> Due:
    """Logs the trouble that the monitors' metrics predict; returns what is due, with a checkpoint if one is wanted."""
    step = reading.step
    # Each rank inspects its own part of the batch. All ranks use rank 0's metrics, so that their forecasts agree.
    found = forecast.look(step, parallel.from_main({**reading_metrics(reading, 0), **seen}))
    log_predictions(tracker, step, found)
    if not forecast.keeps or not parallel.any_rank(bool(found)):
        return due
    forecast.keep(step)
    return replace(due, save=True)


def judge_step(
    run: TrainingRun, executed: ExecutedStep, throughput: Throughput, seen: Mapping[str, float] = NOTHING
) -> bool:
    """Judges an executed step, logs it, and acts on the verdict.

    Returns:
        Whether the run continues from the present state. If not, an older state was restored.

    Raises:
        TrainingHalted: the guard gave up.
    """
    step, guard, parallel = StepOfRun(run, executed), run.tools.guard, run.parallel
    reading = step.reading
    if reading.bad_update and not executed.in_flight.undone:
        # The weights are not finite, and there are no copies. Restore an older state and repeat the step with copies:
        # the update is then undone immediately, and can be investigated.
        guard.update_check.failed = True
        guard.note_retry(reading.step, reading.rank)
        restore(run, executed, reading.step, BAD_UPDATE, throughput)
        guard.note_retry(reading.step, reading.rank)  # the restored guard does not know it
        return False
    # The verdict on the numbers, after an investigation of a held step, which may change it.
    verdict = settle(step)
    parallel.note_stop(reading.stop)
    if verdict is Verdict.RESTORE and (reading.applied or guard.kind == "state"):
        return restore(run, executed, reading.step, guard.reason, throughput)
    if verdict in (Verdict.RESTORE, Verdict.KEEP):  # the step is not logged: it is repeated, and logged then
        # The step was skipped, so its wrong numbers have changed nothing but buffers: just take it again. It counts as
        # executed, so that a fault injected at this tick does not return.
        executed.saved_buffers.put_back()
        run.data.batches.forget()
        if verdict is Verdict.KEEP:
            run.data.kept = step.without(step.left_out)
        run.state.step -= 1
        note_taken_again(step)
        return False
    skipped_spike = not reading.applied and guard.kind == "spike"
    log_alarms(run.tracker, reading.step, [*run.monitoring.rolling.add(reading, skipped_spike), *guard.new_alarms()])
    log_step(run, reading, throughput, seen)
    if run.state.step == run.plan.steps:  # no later step will show whether the trouble ends
        verdict = guard.at_end(verdict)
    if verdict is Verdict.APPLY:
        run.history.count_update(reading.loss)
        run.monitoring.forecast.add_loss(reading.loss)
    return act_on_verdict(run, verdict, throughput)


def act_on_verdict(run: TrainingRun, verdict: Verdict, throughput: Throughput) -> bool:
    """Restores, rolls back or halts if the verdict says so; returns whether the run continues from the present state.

    Raises:
        TrainingHalted: the guard gave up.
    """
    step, guard = run.state.step, run.tools.guard
    if verdict is Verdict.RESTORE:  # the fault was found after the step
        return restore(run, None, step, guard.reason, throughput, to=step)
    if verdict is Verdict.ROLLBACK:
        throughput.measure()
        run.rollback.roll_back(step)
        # The checksums of the restored state are the reference for the next comparison.
        guard.state_check.after_update(run.state, buffers_of(run.state.model).save())
        throughput.resume()
    if verdict is Verdict.HALT:
        throughput.measure()
        # The event comes first: if the process is killed here, it tells a resumed run to try fixes.
        run.rollback.note_halt(step, guard.reason, machine=guard.kind in ("state", "recheck"))
        # The present weights may be bad, so leave the last healthy ones on disk.
        if (last_healthy := run.saved.save_last_healthy()) is not None:
            run.tracker.mark(last_healthy, run.state.executed_steps)
        run.saved.checkpoints.wait()
        raise TrainingHalted(f"step {step}: {guard.reason}")
    return verdict is not Verdict.ROLLBACK


def restore(
    run: TrainingRun,
    executed: ExecutedStep | None,
    step: int,
    reason: str,
    throughput: Throughput,
    *,
    to: int | None = None,
) -> bool:
    """Restores the state from before `step`, or from after `to` steps, bit for bit; returns False.

    Args:
        executed: the step that was skipped, or whose update is undone; None if the fault was found after it.

    Raises:
        TrainingHalted: no intact state is left.
    """
    throughput.measure()
    guard = run.tools.guard
    guard.reason = reason
    # A saved state lacks buffers that the model does not save, so restore those from the copies of this step.
    if executed is not None:
        executed.saved_buffers.put_back()
    guard.state_check.put_back_buffers()
    run.rollback.put_back(step - 1 if to is None else to, trouble=step, used=to is None)
    guard.state_check.after_update(run.state, buffers_of(run.state.model).save())
    throughput.resume()
    return False


def state_is_unchanged(run: TrainingRun, executed: ExecutedStep, throughput: Throughput) -> bool:
    """Returns whether the state is unchanged since the last update. If not, an older state was restored.

    Args:
        executed: the step of that update.

    Raises:
        TrainingHalted: it has changed, and no state is left to roll back to.
    """
    guard, step = run.tools.guard, StepOfRun(run, executed)
    if not run.parallel.any_rank(not guard.state_check.holds(run.state)):
        return True
    tensors = changed_tensors(step)
    guard.kind = "state"
    verdict = guard.on_machine_fault(step.number, CHANGED, damaged=True)
    run.tracker.event("state_changed", step.number, reason=CHANGED, tensors=tensors, tick=step.tick)
    explain(step, "state", step.reading._replace(state_changed=True))
    return act_on_verdict(run, verdict, throughput)


def replicas_agree(run: TrainingRun, throughput: Throughput) -> bool:
    """Compares the ranks' replicas; returns whether they agree. If not, an older state was restored.

    Raises:
        TrainingHalted: replicas differ, and no state is left to roll back to.
    """
    divergence = run.parallel.find_divergence(run.state)
    if not divergence:
        return True
    guard, tracker = run.tools.guard, run.tracker
    guard.kind = "state"
    verdict = guard.on_machine_fault(run.state.step, divergence, damaged=True)
    tracker.event("divergence", run.state.step, reason=divergence, tick=run.state.executed_steps)
    if verdict is Verdict.APPLY:
        tracker.note(f"step {run.state.step}: {divergence}; guard=off ignores this")
    return act_on_verdict(run, verdict, throughput)


def use_state(run: TrainingRun, due: Due, judged: ExecutedStep, throughput: Throughput) -> None:
    """Evaluates and saves the state if either is due; stops the run after a signal.

    Call this only after the guard has judged the step that led to this state.

    Raises:
        Interrupted: a signal arrived, and the state is saved.
    """
    state, saved, rollback, last = run.state, run.saved, run.rollback, run.state.step == run.plan.steps
    improved, val_loss, replaying = False, None, rollback.replaying
    if due.evaluate or due.save:
        throughput.measure()
    if due.evaluate:
        # Save first if a signal arrived: the scheduler may kill the job before the evaluation ends. States of a replay
        # were saved when the run first reached them.
        if due.stop and not replaying:
            saved.save(None)
            saved.checkpoints.wait()
        best, val_loss = run.history.best_loss, validate(run)
        improved = val_loss < best
        if not state_is_unchanged(run, judged, throughput):  # it changed during the evaluation
            return
        verdict = run.tools.guard.judge_validation(state.step, val_loss)
        log_alarms(run.tracker, state.step, run.tools.guard.new_alarms())
        if not act_on_verdict(run, verdict, throughput):
            return
    if due.snapshot:  # after the evaluation, because its result is part of the state
        saved.take_snapshot()
    if replaying and state.step == replaying.step:
        rollback.finish_replay()
    elif (due.save or improved) and not replaying:
        saved.save(val_loss)
    if due.evaluate or due.save:
        throughput.resume()
    if due.stop and not last:
        rollback.replaying = None  # a resumed run repeats the replay from the checkpoints on disk
        saved.checkpoints.wait()
        run.tracker.event("preempt", state.step, signal=due.stop)
        where = f"{due.stop}: stopped after step {state.step} of {run.plan.steps}"
        message = saved.checkpoints.unsaved() or "the state is saved"
        if not saved.checkpoints.keeps:
            message = "checkpoint=off: nothing is saved"
        raise Interrupted(f"{where}, {message}", saved=saved.checkpoints.keeps)
