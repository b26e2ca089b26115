"""The last steps: shares over the window, one alarm, an exact state."""

import json
import math

import pytest

from stabletrain.monitors.rolling import RollingStats
from stabletrain.records import Reading


def reading(step=1, *, active=0.0, applied=True, loss=2.0, norm=1.0, overflow=False):
    return Reading(
        step=step,
        loss=loss,
        ce=loss,
        zloss=0.0,
        grad_norm=norm,
        clip_coef=1.0,
        clip_active=active,
        inputs=0.0,
        buffers=0.0,
        loss_scale=1.0,
        applied=applied,
        bad_data=False,
        overflow=overflow,
        lr=1e-3,
    )


def test_shares_are_of_the_window_and_of_the_right_steps():
    rolling = RollingStats(window=4)
    assert rolling.metrics() == {
        "clip/fraction": 0.0,
        "guard/skip_rate": 0.0,
        "spike/score": 0.0,
        "spike/grad_norm_score": 0.0,
    }
    for active in (1.0, 1.0, 0.5, 0.0):
        rolling.add(reading(active=active))
    rolling.add(reading(active=1.0, applied=False, loss=math.nan, norm=math.inf))
    metrics = rolling.metrics()
    assert metrics["clip/fraction"] == 2.5 / 4, "a withheld step was not clipped"
    assert metrics["guard/skip_rate"] == 1 / 4
    rolling.add(reading(active=0.0))
    assert rolling.metrics()["clip/fraction"] == 1.5 / 4


def test_a_withheld_step_enters_no_spike_score():
    rolling = RollingStats()
    for i in range(40):
        rolling.add(reading(loss=2.0 + 0.1 * (i % 2), norm=1.0 + 0.1 * (i % 2)))
    before = rolling.state_dict()["spikes"]
    rolling.add(reading(applied=False, loss=1e30, norm=1e30))
    assert rolling.state_dict()["spikes"] == before
    rolling.add(reading(loss=9.0, norm=1.0))
    metrics = rolling.metrics()
    assert metrics["spike/score"] == 1 / 21
    assert metrics["spike/grad_norm_score"] == 0.0


def test_clipping_nearly_always_is_told_once():
    rolling = RollingStats(window=20)
    alarms = [alarm for i in range(60) for alarm in rolling.add(reading(active=float(i != 5)))]
    assert [alarm.kind for alarm in alarms] == ["clipping"]
    assert "95%" in alarms[0].text
    assert "optimizer.lr" in alarms[0].text


@pytest.mark.parametrize(("active", "steps"), [(1.0, 19), (0.94, 60)])
def test_no_alarm_before_the_window_is_full_or_below_the_share(active, steps):
    rolling = RollingStats(window=20)
    assert not [alarm for _ in range(steps) for alarm in rolling.add(reading(active=active))]


def test_state_goes_through_json_and_continues_exactly():
    def steps(start, stop):
        return [
            reading(i, active=(i * 7 % 10) / 10, applied=i % 9 != 0, loss=2 + (i % 5) / 3) for i in range(start, stop)
        ]

    whole, first, second = RollingStats(window=30), RollingStats(window=30), RollingStats(window=30)
    for step in steps(0, 50):
        whole.add(step)
        first.add(step)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in steps(50, 90):
        assert whole.add(step) == second.add(step)
        assert whole.metrics() == second.metrics()
    assert whole.state_dict() == second.state_dict()


def test_an_alarm_is_not_raised_again_after_a_resume():
    first, second = RollingStats(window=20), RollingStats(window=20)
    assert [alarm for _ in range(20) for alarm in first.add(reading(active=1.0))]
    second.load_state_dict(first.state_dict())
    assert not [alarm for _ in range(40) for alarm in second.add(reading(active=1.0))]


def test_a_rising_skip_rate_is_told_once_long_before_a_row_of_skips():
    rolling = RollingStats()
    alarms = []
    for i in range(100):  # one in four is skipped: never two in a row
        alarms += rolling.add(reading(applied=i % 4 != 3))
    (alarm,) = alarms
    assert alarm.kind == "skips"
    assert alarm.text.startswith("5 of the last 20 steps were skipped")


def test_overflows_of_a_calibrating_loss_scale_alarm_nobody():
    rolling = RollingStats()
    assert [alarm for _ in range(50) for alarm in rolling.add(reading(applied=False, overflow=True))] == []


def test_an_alarm_outlasts_a_rollback():
    rolling = RollingStats()
    before = rolling.state_dict()
    for _ in range(5):
        rolling.add(reading(applied=False))
    lasting = rolling.cumulative_state()
    rolling.load_state_dict(before)
    rolling.load_cumulative_state(lasting)
    assert [alarm for _ in range(5) for alarm in rolling.add(reading(applied=False))] == []
