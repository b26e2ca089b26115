"""What is logged of a step: metrics only when due, under their names in `metrics.jsonl`."""

from types import SimpleNamespace

import pytest

from stabletrain.guard.policy import SkipGuard
from stabletrain.guard.reports import log_alarms
from stabletrain.monitors.rolling import Alarm
from stabletrain.trainer.history import HealingHistory, Throughput
from stabletrain.trainer.reports import NOTHING, final_metrics, log_step, reading_metrics
from stabletrain.trainer.rollback import PendingReplay
from tests.trainer.given import batch, make_run, reading


def lines_of(step, seen=NOTHING, **options):
    run = make_run(**options)
    log_step(run, reading(step), Throughput(run.history), seen)
    return run.output.tracker.lines


@pytest.mark.parametrize(
    ("step", "written"), [(1, True), (2, False), (9, False), (10, True), (11, False), (20, True), (37, True)]
)
def test_a_line_is_written_at_the_first_the_last_and_every_tenth_step(step, written):
    assert bool(lines_of(step, steps=37, log_every=10)) == written


def test_gpus_are_looked_at_when_a_line_is_due_and_what_they_used_is_in_the_final_metrics():
    looks = []
    meter = SimpleNamespace(sample=lambda: looks.append(0), metrics=lambda: {"gpu/energy_kwh": 2.0})
    run = make_run(steps=37, log_every=10)
    run.monitoring.meter = meter
    for step in range(2, 10):
        log_step(run, reading(step), Throughput(run.history), NOTHING)
    assert not looks
    log_step(run, reading(10), Throughput(run.history), NOTHING)
    assert len(looks) == 1
    assert final_metrics(run)["gpu/energy_kwh"] == 2.0


def test_what_the_monitors_saw_is_written_at_once_and_in_the_same_line():
    ((step, metrics),) = lines_of(7, {"probe/noise": 3.0})
    assert step == 7
    assert metrics["probe/noise"] == 3.0
    assert metrics["train/loss"] == 2.0


def test_the_line_has_each_number_under_its_name():
    run = make_run(guard=SkipGuard())
    run.tools.guard.skips.update(spike=2, overflow=1)
    run.tools.guard.rollbacks = 4
    run.state.executed_steps = 23
    log_step(run, reading(20, applied=False), Throughput(run.history), NOTHING)
    ((_, metrics),) = run.output.tracker.lines
    expected = {
        "train/loss": 2.0,
        "train/ce": 1.75,
        "train/zloss": 0.25,
        "grad/norm": 0.5,
        "clip/coef": 1.0,
        "lr": 0.125,
        "precision/loss_scale": 1.0,
        "guard/skipped": 3,
        "guard/applied": 0,
        "guard/rollbacks": 4,
        "tick": 23,
    }
    assert {name: metrics[name] for name in expected} == expected
    others = {"clip/fraction", "guard/skip_rate", "spike/score", "spike/grad_norm_score"}
    assert set(metrics) - set(expected) == others | {"samples_per_s", "memory/peak_gb"}


@pytest.mark.parametrize(("escalate", "counts"), [("halt", {}), ("whatif", {"guard/healings": 1})])
def test_a_run_that_may_heal_logs_how_often_it_did(escalate, counts):
    run = make_run(guard=SkipGuard(escalate=escalate))
    run.saved.healing = HealingHistory(healed_by=["clip"], whatif_steps=300)
    log_step(run, reading(20), Throughput(run.history), NOTHING)
    ((_, metrics),) = run.output.tracker.lines
    assert {name: metrics[name] for name in metrics if name.endswith(("healings", "whatif_steps"))} == counts
    final = {name: count for name, count in final_metrics(run).items() if name.endswith(("healings", "whatif_steps"))}
    assert final == (counts and {**counts, "guard/whatif_steps": 300})


def test_every_step_updates_the_progress_line_and_only_a_logged_one_ends_an_interval():
    run = make_run(guard=SkipGuard())
    run.tools.guard.skips["spike"] = 2
    throughput = Throughput(run.history)
    throughput.count(batch(size=4))
    log_step(run, reading(9), throughput, NOTHING)
    assert run.output.tracker.shown == [(9, 0.0, "sample", 2)]
    assert run.history.units == 0
    log_step(run, reading(10), throughput, NOTHING)
    assert run.output.tracker.shown[1] == (10, throughput.rate, "sample", 2)
    assert throughput.rate > 0
    assert run.history.units == 4


def test_a_replayed_step_is_not_logged_again():
    run = make_run()
    run.rollback.replaying = PendingReplay(30, 40, 45, [], {})
    log_step(run, reading(10), Throughput(run.history), NOTHING)
    log_alarms(run.tracker, 10, [Alarm("skips", "many")])
    tracker = run.output.tracker
    assert (tracker.lines, tracker.shown, tracker.events) == ([], [], [])


def test_no_two_numbers_of_a_reading_share_a_name():
    numbers = reading(loss=1.0, terms={"ce": 2.0, "zloss": 3.0}, grad_norm=4.0, clip_coef=5.0, lr=6.0, loss_scale=7.0)
    assert sorted(reading_metrics(numbers, 8).values()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8]
