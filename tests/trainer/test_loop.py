"""The loop: what is due when, what follows from a verdict, and how a run's end is recorded."""

import math

import pytest
import torch

from stabletrain.checkpoint.reader import UnusableCheckpoint
from stabletrain.errors import ConfigError, Interrupted, RankLost, TrainingHalted
from stabletrain.guard.policy import NoGuard, SkipGuard
from stabletrain.guard.policy.retained import NoRetainedStates
from stabletrain.machine.signals import NoStopRequest
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch, Verdict
from stabletrain.trainer.evaluate import validate
from stabletrain.trainer.history import Throughput
from stabletrain.trainer.loop import Due, act_on_verdict, due_after_step, judge_step, replicas_agree, train, use_state
from stabletrain.trainer.reports import final_metrics, status_of
from stabletrain.trainer.rollback import PendingReplay
from tests.trainer.given import Saves, batch, executed, make_run, reading


class AtStep7(NoRetainedStates):
    """A snapshot is due after step 7."""

    def due(self, step):
        return step == 7


class Snapshotting(SkipGuard):
    """Keeps the state after step 7 in memory."""

    states = AtStep7()


class Halting(SkipGuard):
    """Gives up on the third step."""

    def judge(self, reading):
        self.reason = "enough"
        return Verdict.HALT if reading.step == 3 else Verdict.APPLY


class Diverged(SingleProcess):
    """Finds that the ranks differ."""

    def find_divergence(self, state):
        return "rank 1 differs"


NOTHING_DUE = Due(evaluate=False, save=False, snapshot=False, stop="", reading=False)


class Asked(NoStopRequest):
    """Asks this rank to stop, or all of them at once."""

    def __init__(self, name="", agreed=""):
        self.name, self.agreed = name, agreed


def due(step, *, watching=False, signal="", agreed="", first=1, replaying=False, **options):
    run = make_run(**{"steps": 100, "eval_every": 20, "checkpoints": Saves(every=15), **options})
    run.state.step = step
    if replaying:
        run.rollback.replaying = PendingReplay(50, 60, 70, [], {})
    return due_after_step(run, watching, Asked(signal, agreed), first)


def test_after_most_steps_nothing_is_due_and_the_numbers_can_wait():
    assert due(7) == NOTHING_DUE
    assert not due(7).state_is_used


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"step": 7, "watching": True}, set()),
        ({"step": 7, "first": 7}, set()),
        ({"step": 7, "replaying": True}, set()),
        ({"step": 40}, {"evaluate"}),
        ({"step": 45}, {"save"}),
        ({"step": 60}, {"evaluate", "save"}),
        ({"step": 7, "guard": Snapshotting()}, {"snapshot"}),
        ({"step": 7, "signal": "SIGTERM"}, {"save"}),
        ({"step": 100}, {"evaluate", "save"}),
        ({"step": 37, "steps": 37}, {"evaluate", "save"}),
    ],
)
def test_what_is_due_needs_the_steps_numbers_at_once(asked, what):
    found = due(**asked)
    assert {name for name in ("evaluate", "save", "snapshot") if getattr(found, name)} == what
    assert found.reading
    assert found.stop == asked.get("signal", "")
    assert found.state_is_used == bool(what)


def test_all_ranks_stop_together_and_not_for_a_signal_that_only_one_has_heard():
    class NotYet(SingleProcess):
        def stopping(self, signal):
            return ""

    assert due(7, signal="SIGTERM", parallel=NotYet()) == NOTHING_DUE
    assert due(7, agreed="all of them know", parallel=NotYet()).stop == "all of them know"


# ---- a whole run


def test_a_run_trains_every_step_and_says_that_it_finished():
    run = make_run(steps=12, eval_every=5, log_every=4, checkpoints=Saves(every=6))
    before = run.state.model.weight.detach().clone()
    assert train(run) is run.history
    assert (run.state.step, run.state.executed_steps, run.history.updates) == (12, 12, 12)
    assert not torch.equal(run.state.model.weight, before)
    tracker = run.output.tracker
    assert [step for step, line in tracker.lines if "train/loss" in line] == [1, 4, 8, 12]
    assert [step for step, line in tracker.lines if "val/loss" in line] == [5, 10, 12]
    assert [shown[0] for shown in tracker.shown] == [*range(1, 13)]
    assert run.saved.checkpoints.saves == [5, 6, 10, 12]  # two of them because the loss is the best so far
    assert run.output.folder.ended == [("finished", None)]
    assert tracker.closed == [0]
    assert tracker.summed["status"] == "finished"
    assert run.history.units == 12 * 4
    assert run.data.batches.closed


def test_batches_of_training_and_of_validation_go_to_the_device_the_same_way():
    run = make_run(steps=3)
    moved, to_device = [], run.data.to_device
    run.data.to_device = lambda batch: moved.append(batch) or to_device(batch)
    validation = list(run.data.validation())
    run.data.validation = lambda: iter(validation)
    train(run)
    assert len(moved) == 3 + len(validation)
    assert all(any(batch is each for each in moved) for batch in validation)


def test_a_best_checkpoint_that_cannot_be_read_at_the_end_undoes_no_success():
    class Damaged(Saves):
        def best(self):
            raise UnusableCheckpoint("step-00000010: 0 bytes")

    run = make_run(steps=12, eval_every=5, checkpoints=Damaged(every=6))
    assert train(run) is run.history
    assert run.output.folder.ended == [("finished", None)]


def test_a_run_that_halts_says_so_and_keeps_its_numbers():
    run = make_run(steps=12, guard=Halting())
    with pytest.raises(TrainingHalted, match=r"^step \d+: enough$"):
        train(run)
    tracker = run.output.tracker
    ((status, reason),) = run.output.folder.ended
    assert (status, reason.endswith(": enough")) == ("halted", True)
    assert tracker.closed == [TrainingHalted.exit_code]
    assert (tracker.summed["status"], tracker.summed["guard/updates"]) == ("halted", 2)
    assert [kind for kind, *_ in tracker.events] == ["halt"]
    assert run.data.batches.closed


def test_an_error_within_a_step_is_recorded_and_raised_as_it_was():
    run = make_run(steps=12)
    failure = RuntimeError()

    def get(step):
        raise failure

    run.data.batches.get = get
    with pytest.raises(RuntimeError) as raised:
        train(run)
    assert raised.value is failure
    assert run.output.folder.ended == [("failed", "RuntimeError")]
    assert run.output.tracker.closed == [1]
    assert run.data.batches.closed


# ---- verdicts


@pytest.fixture(autouse=True)
def _computed_again(monkeypatch):
    """The readings here are made up, so a step that is computed again would come out otherwise."""
    monkeypatch.setattr("stabletrain.trainer.incidents.StepOfRun.differs_when_repeated", lambda *_: False)


def settled(guard, numbers, **options):
    run = make_run(guard=guard, **options)
    run.state.step = numbers.step
    stays = judge_step(run, executed(numbers), Throughput(run.history))
    return run, stays


def test_only_an_applied_update_counts_as_one():
    run, stays = settled(SkipGuard(), reading(5))
    assert (stays, run.history.updates) == (True, 1)
    run, stays = settled(SkipGuard(), reading(5, applied=False, loss=math.nan))
    assert (stays, run.history.updates) == (True, 0)
    assert [kind for kind, *_ in run.output.tracker.events] == ["skip", "incident"]
    assert run.monitoring.rolling.metrics()["guard/skip_rate"] == 1.0


@pytest.mark.parametrize(
    ("fault", "score"), [({"loss": 9.0}, 1.0), ({"loss": math.nan}, 0.0), ({"bad_data": True}, 0.0)]
)
def test_a_step_skipped_as_a_spike_counts_in_the_spike_score(fault, score):
    run, _ = settled(SkipGuard(), reading(5, applied=False, **fault))
    assert run.monitoring.rolling.metrics()["spike/score"] == score


def test_a_verdict_of_a_rollback_restores_an_older_state_once():
    run, asked = make_run(), []
    run.rollback.roll_back = lambda *arguments: asked.append(arguments)
    run.state.step = 9
    assert act_on_verdict(run, Verdict.APPLY, Throughput(run.history))
    assert act_on_verdict(run, Verdict.SKIP, Throughput(run.history))
    assert not asked
    assert not act_on_verdict(run, Verdict.ROLLBACK, Throughput(run.history))
    assert asked == [(9,)]


def test_a_verdict_to_restore_puts_the_state_back_from_which_the_run_goes_on():
    run, asked = make_run(), []
    run.rollback.put_back = lambda *arguments, **options: asked.append((*arguments, options))
    run.state.step = 9
    assert not act_on_verdict(run, Verdict.RESTORE, Throughput(run.history))
    assert asked == [(9, {"trouble": 9, "used": False})]


def test_a_verdict_to_halt_leaves_the_last_healthy_state_on_the_disk_before_the_run_ends():
    run, done = make_run(guard=Halting(), checkpoints=Saves()), []
    run.saved.save_last_healthy = lambda: done.append("saved")
    run.saved.checkpoints.wait = lambda: done.append("waited for")
    run.tools.guard.reason = "enough"
    run.state.step = 9
    with pytest.raises(TrainingHalted, match=r"^step 9: enough$"):
        act_on_verdict(run, Verdict.HALT, Throughput(run.history))
    assert done == ["saved", "waited for"]


def test_only_the_last_step_asks_the_guard_what_the_end_of_the_run_changes():
    class Wants(SkipGuard):
        def at_end(self, verdict):
            return Verdict.HALT

    assert settled(Wants(), reading(5))[1]
    with pytest.raises(TrainingHalted):
        settled(Wants(), reading(100))


def test_ranks_that_differ_halt_a_guarded_run_and_are_let_be_without_a_guard():
    alike = make_run()
    assert replicas_agree(alike, Throughput(alike.history))
    assert not alike.output.tracker.events
    free = make_run(guard=NoGuard(), parallel=Diverged())
    assert replicas_agree(free, Throughput(free.history))
    assert free.output.tracker.events[0][0] == "divergence"
    assert "rank 1 differs" in free.output.tracker.notes[0]
    guarded = make_run(guard=SkipGuard(), parallel=Diverged())
    with pytest.raises(TrainingHalted, match="rank 1 differs"):
        replicas_agree(guarded, Throughput(guarded.history))


# ---- a settled state


@pytest.mark.parametrize(("checkpoints", "saved"), [(Saves(), True), (None, False)])
def test_a_signal_ends_the_run_and_says_whether_its_state_is_saved(checkpoints, saved):
    run = make_run(checkpoints=checkpoints)
    run.state.step = 7
    due = Due(evaluate=False, save=True, snapshot=False, stop="SIGTERM", reading=True)
    with pytest.raises(Interrupted, match="SIGTERM: stopped after step 7 of 100") as raised:
        use_state(run, due, executed(reading()), Throughput(run.history))
    assert raised.value.saved == saved
    assert ("checkpoint=off" in str(raised.value)) == (not saved)
    assert run.output.tracker.events == [("preempt", 7, {"signal": "SIGTERM"})]
    assert not saved or run.saved.checkpoints.saves == [7]


def test_a_signal_after_the_last_step_interrupts_nothing():
    run = make_run(checkpoints=Saves())
    run.state.step = 100
    use_state(
        run,
        Due(evaluate=True, save=True, snapshot=False, stop="SIGTERM", reading=True),
        executed(reading()),
        Throughput(run.history),
    )
    assert run.saved.checkpoints.saves == [100, 100]  # before the evaluation too, which may take too long
    assert run.history.val_step == 100


def test_a_state_is_saved_when_it_is_the_best_so_far_and_then_not_when_it_is_not():
    run = make_run(checkpoints=Saves())
    due = Due(evaluate=True, save=False, snapshot=False, stop="", reading=True)
    run.state.step = 20
    use_state(run, due, executed(reading()), Throughput(run.history))
    run.state.step = 40
    use_state(run, due, executed(reading()), Throughput(run.history))  # the same weights, so the same loss
    assert run.saved.checkpoints.saves == [20]
    assert run.history.best_step == 20


def test_the_best_evaluation_is_remembered_and_the_newest_is_reported():
    run = make_run()
    run.state.step = 20
    first = validate(run)
    with torch.no_grad():
        run.state.model.weight.mul_(100.0)
    run.state.step, run.state.executed_steps = 40, 45
    second = validate(run)
    assert second > first
    history, tracker = run.history, run.output.tracker
    assert (history.best_loss, history.best_step) == (first, 20)
    assert (history.val["val/loss"], history.val_step) == (second, 40)
    assert tracker.summed == {"best/val_loss": first, "best/step": 20}
    assert [(step, line["tick"], line["val/loss"]) for step, line in tracker.lines] == [
        (20, 0, first),
        (40, 45, second),
    ]


def test_bad_validation_data_is_told_once_and_recorded_each_time():
    run = make_run()
    bad = Batch(batch().inputs, torch.tensor([0, 1, 2, 9]))
    run.data.validation = lambda: iter([bad, batch()])
    validate(run)
    validate(run)
    tracker = run.output.tracker
    assert [event for event in tracker.events if event[0] == "bad_validation"] == [
        ("bad_validation", 0, {"batches": 1})
    ] * 2
    assert len(tracker.notes) == 1
    assert "1 batches hold bad data" in tracker.notes[0]


# ---- the end


def test_the_final_numbers_are_those_of_history_and_guard():
    run = make_run(guard=SkipGuard())
    run.state.step, run.state.executed_steps = 90, 97
    run.tools.guard.skips.update(spike=3, overflow=2)
    run.tools.guard.rollbacks = 1
    run.history.load_state_dict(
        {
            "best_loss": 1.25,
            "best_step": 80,
            "val": {"val/loss": 1.5},
            "val_step": 90,
            "updates": 85,
            "seconds": 20.0,
            "units": 600,
            "lost_steps": 7,
            "lost_seconds": 1.5,
        }
    )
    numbers = final_metrics(run)
    expected = {
        "val/loss": 1.5,
        "steps": 90,
        "ticks": 97,
        "best/val_loss": 1.25,
        "best/step": 80,
        "seconds": 20.0,
        "samples_per_s": 30.0,
        "guard/updates": 85,
        "guard/rollbacks": 1,
        "guard/lost_steps": 7,
        "guard/lost_seconds": 1.5,
        "guard/skipped": 5,
        "guard/skipped_spike": 3,
        "guard/skipped_overflow": 2,
        "guard/skipped_nonfinite": 0,
        "guard/skipped_bad_data": 0,
        "guard/skipped_state": 0,
        "guard/skipped_recheck": 0,
        "guard/skipped_update": 0,
        "guard/machine_faults": 0,
        "spike/score": 0.0,
    }
    assert {name: numbers[name] for name in expected} == expected
    assert set(numbers) - set(expected) == {"memory/peak_gb"}


def test_a_run_of_no_steps_has_final_numbers():
    numbers = final_metrics(make_run())
    assert (numbers["samples_per_s"], numbers["steps"], numbers["best/val_loss"]) == (0.0, 0, math.inf)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TrainingHalted("x"), "halted"),
        (Interrupted("x", saved=True), "preempted"),
        (KeyboardInterrupt(), "preempted"),
        (RankLost("x"), "failed"),
        (ConfigError("x"), "failed"),
        (MemoryError(), "failed"),
    ],
)
def test_how_a_run_ended_by_its_error(error, status):
    assert status_of(error) == status
