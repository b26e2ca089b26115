"""The run's history: exact through a checkpoint, partly kept by a rollback; and the throughput, by a fake clock."""

import json
import math

import pytest

from stabletrain.trainer import history
from stabletrain.trainer.history import History, Throughput
from tests.trainer.given import batch


@pytest.fixture
def clock(monkeypatch):
    """Moves only when the test says so."""
    now = [100.0]
    monkeypatch.setattr(history.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_a_history_goes_through_json_exactly():
    first = History(1.5, 40, {"val/loss": 1.5}, 50, 48, 12.25, 1600, 3, 0.5)
    second = History()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second == first
    fresh = History()
    fresh.load_state_dict(json.loads(json.dumps(History().state_dict())))
    assert math.isinf(fresh.best_loss)


def test_a_rollback_keeps_time_and_data_spent_and_restores_the_results_of_the_old_state():
    live = History(best_loss=9.0, best_step=90, updates=90, seconds=30.0, units=900, lost_steps=5, lost_seconds=2.0)
    lasting = live.cumulative_state()
    restored = History(best_loss=1.0, best_step=50, updates=50, seconds=18.0, units=500, lost_steps=0, lost_seconds=0.0)
    restored.load_cumulative_state(lasting)
    assert (restored.best_loss, restored.best_step, restored.updates) == (1.0, 50, 50)
    assert (restored.seconds, restored.units, restored.lost_steps) == (30.0, 900, 5)
    assert restored.lost_seconds == 2.0 + (30.0 - 18.0)


def test_the_cumulative_state_is_a_copy():
    live = History(seconds=3.0)
    lasting = live.cumulative_state()
    live.seconds = 7.0
    assert lasting["seconds"] == 3.0


def test_the_rate_is_of_the_last_interval_and_the_history_adds_up_all(clock):
    kept = History(seconds=1.0, units=10)
    pace = Throughput(kept)
    pace.count(batch(size=4))
    pace.count(batch(size=8))
    clock(3.0)
    pace.measure()
    assert pace.rate == 4.0
    pace.count(batch(size=4))
    clock(0.5)
    pace.measure()
    assert pace.rate == 8.0
    assert (kept.seconds, kept.units) == (4.5, 26)


def test_time_that_was_not_spent_on_training_does_not_count(clock):
    kept = History()
    pace = Throughput(kept)
    pace.count(batch(size=6))
    clock(2.0)
    pace.measure()
    clock(1000.0)  # an evaluation
    pace.resume()
    pace.count(batch(size=6))
    clock(2.0)
    pace.measure()
    assert (kept.seconds, kept.units, pace.rate) == (4.0, 12, 3.0)


def test_the_other_ranks_parts_count_too(clock):
    pace = Throughput(kept := History(), 8)
    pace.count(batch(size=4))
    clock(2.0)
    pace.measure()
    assert (kept.units, pace.rate) == (32, 16.0)


def test_a_clock_that_stands_still_is_no_division_by_zero(clock):
    pace = Throughput(History())
    pace.count(batch())
    pace.measure()
    assert pace.rate == 0.0
