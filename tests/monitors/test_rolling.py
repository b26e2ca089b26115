"""Spikes against a naive loop in exact arithmetic, and the corners of the definition."""

import json
import math
import random
import sys
from fractions import Fraction
from statistics import fmean, pstdev

import pytest

from stabletrain.monitors.rolling import RESOLUTION, RollingStats, Spikes, Window
from stabletrain.records import Reading


def spike_score(values, window=1000, sigma=7.0):
    """The spike score of a finished run's values."""
    spikes = Spikes(window, sigma)
    for value in values:
        spikes.add(value)
    return spikes.score


def naive(values, window, sigma, minimum):
    """Share of values at least sigma standard deviations from the mean of the window before them, in fractions."""
    judged = spikes = 0
    for i, value in enumerate(values):
        before = [Fraction(v) for v in values[max(0, i - window) : i]]
        if len(before) < minimum:
            continue
        mean = sum(before) / len(before)
        variance = sum((v - mean) ** 2 for v in before) / len(before)
        judged += 1
        spikes += (Fraction(value) - mean) ** 2 >= Fraction(sigma) ** 2 * variance
    return spikes / judged


def noisy(seed, count=400, offset=0.0):
    generator = random.Random(seed)
    spiky = {generator.randrange(count): generator.choice([-1, 1]) * generator.uniform(3, 12) for _ in range(20)}
    return [offset + generator.gauss(0, 1) + spiky.get(i, 0.0) for i in range(count)]


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e6])
@pytest.mark.parametrize("window", [20, 64, 1000])
def test_the_score_is_the_naive_loops(window, offset):
    values = noisy(window, count=150 if window == 1000 else 200, offset=offset)
    expected = naive(values, window, 4.0, 20)
    assert expected > 0
    assert spike_score(values, window, 4.0) == pytest.approx(expected, abs=1e-12)


def test_a_value_is_not_in_its_own_window():
    spikes = Spikes(window=20, minimum=20)
    values = [float(i % 2) for i in range(20)]
    for value in values:
        spikes.add(value)
    assert spikes.z(100.0) == pytest.approx((100.0 - 0.5) / 0.5)
    assert spikes.add(100.0) == pytest.approx(199.0)
    assert spikes.score == 1.0


def test_exactly_sigma_counts_and_below_does_not():
    values = [float(i % 2) for i in range(20)]
    assert spike_score([*values, 0.5 + 7 * 0.5], 20, 7.0) == 1.0
    assert spike_score([*values, math.nextafter(0.5 + 7 * 0.5, 0)], 20, 7.0) == 0.0
    assert spike_score([*values, 0.5 - 7 * 0.5], 20, 7.0) == 1.0, "below the mean counts too"


def test_no_huge_value_leaves_a_trace_once_it_has_left_the_window():
    spikes, fresh = Spikes(window=20), Spikes(window=20)
    for value in [3e38, -3e38, *noisy(0, 20)]:
        spikes.add(value)
    for value in noisy(0, 20):
        fresh.add(value)
    assert spikes.z(2.5) == fresh.z(2.5)
    assert abs(fresh.z(2.5)) > 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_enters(bad):
    spikes = Spikes()
    for value in noisy(1, 50):
        spikes.add(value)
    before = spikes.state_dict()
    assert spikes.add(bad) == math.inf
    assert spikes.state_dict() == before


def test_nothing_is_judged_before_the_minimum():
    spikes = Spikes(minimum=20)
    for value in [*[1.0] * 19, 1e9]:
        assert spikes.add(value) == 0.0
    assert (spikes.judged, spikes.score) == (0, 0.0)


def test_a_constant_window_has_the_resolution_of_fp32():
    spikes = Spikes()
    for _ in range(50):
        spikes.add(0.1)
    assert abs(spikes.z(0.1)) < 1e-6
    assert spikes.z(0.1 * (1 + 2.0**-23)) == pytest.approx(1.0, rel=1e-6)
    assert spikes.z(0.2) > 1e6
    zeros = Spikes()
    for _ in range(50):
        zeros.add(0.0)
    assert (zeros.z(0.0), zeros.z(1e-30), zeros.z(-1e-30)) == (0.0, math.inf, -math.inf)


def test_the_state_of_spikes_goes_through_json_and_continues_exactly():
    values = noisy(2, 300)
    whole, first = Spikes(window=64, sigma=3.0), Spikes(window=64, sigma=3.0)
    for value in values[:150]:
        whole.add(value)
        first.add(value)
    second = Spikes(window=64, sigma=3.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.add(value) for value in values[150:]] == [whole.add(value) for value in values[150:]]
    assert second.state_dict() == whole.state_dict()
    assert whole.score == spike_score(values, 64, 3.0) > 0


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 1e300])
def test_mean_and_deviation_are_exact_whatever_the_window_held_before(scale):
    """As fractions give them, rounded once; a value that left the window leaves no rounding error behind."""
    values = [1e18, *(scale * value for value in noisy(3, 80)), 5e-324, -3.5]
    window, limit = Window(32), Spikes(window=32, sigma=3.0, minimum=2)
    for number, value in enumerate(values, 1):
        window.add(value)
        limit.add(value)
        kept = [Fraction(each) for each in values[max(number - 32, 0) : number]]
        middle = sum(kept) / len(kept)
        variance = sum((each - middle) ** 2 for each in kept) / len(kept)
        mean, deviation = window.normal()
        root = math.inf if variance > Fraction(sys.float_info.max) else math.sqrt(variance)
        assert (mean, deviation) == (float(middle), max(root, RESOLUTION * abs(mean)))
        assert window.negative == sum(each < 0 for each in kept)
        if number > 1:
            assert limit.limit == mean + 3.0 * deviation
    other = Spikes(window=32, sigma=3.0, minimum=2)
    other.add(1.0)
    other.load_state_dict(limit.state_dict())
    assert (other.limit, other.window.normal()) == (limit.limit, window.normal())
    assert window.newest(3) == values[-3:]


@pytest.mark.parametrize("wrong", [{"window": 10}, {"minimum": 1}, {"sigma": 0.0}])
def test_bounds(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Spikes(**wrong)


def reading(step=1, *, active=0.0, applied=True, loss=2.0, norm=1.0, overflow=False):
    return Reading(
        step=step,
        loss=loss,
        terms={},
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
    assert metrics["clip/fraction"] == 2.5 / 4, "a skipped step was not clipped"
    assert metrics["guard/skip_rate"] == 1 / 4
    rolling.add(reading(active=0.0))
    assert rolling.metrics()["clip/fraction"] == 1.5 / 4


def test_a_skipped_step_enters_no_window_and_counts_only_if_skipped_as_a_spike():
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
    windows = {name: state["values"] for name, state in rolling.state_dict()["spikes"].items()}
    for value in (2.5, 1e30, math.nan):  # the guard's limit may be lower than the scores'
        rolling.add(reading(applied=False, loss=value, norm=value), skipped_spike=True)
    metrics = rolling.metrics()
    assert (metrics["spike/score"], metrics["spike/grad_norm_score"]) == (4 / 24, 3 / 24)
    assert windows == {name: state["values"] for name, state in rolling.state_dict()["spikes"].items()}


def test_skipped_spikes_count_after_a_rollback_and_after_the_resume_of_a_halted_run():
    rolling = RollingStats()
    for i in range(40):
        rolling.add(reading(loss=2.0 + 0.1 * (i % 2), norm=1.0 + 0.1 * (i % 2)))
    before = rolling.state_dict()
    for _ in range(5):
        rolling.add(reading(applied=False, loss=9.0), skipped_spike=True)
    cumulative = json.loads(json.dumps(rolling.cumulative_state()))
    rolling.load_state_dict(before)
    assert rolling.metrics()["spike/score"] == 0.0
    rolling.load_cumulative_state(cumulative)
    assert rolling.metrics()["spike/score"] == 5 / 25
    resumed = RollingStats()
    resumed.load_state_dict({**before, **cumulative})  # as `Rollback.save_last_healthy` writes it
    assert resumed.metrics() == rolling.metrics()


def test_clipping_nearly_always_raises_one_alarm():
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


def test_a_rising_skip_rate_raises_one_alarm_before_many_skips_in_a_row():
    rolling = RollingStats()
    alarms = []
    for i in range(100):  # one in four is skipped: never two in a row
        alarms += rolling.add(reading(applied=i % 4 != 3))
    (alarm,) = alarms
    assert alarm.kind == "skips"
    assert alarm.text.startswith("5 of the last 20 steps were skipped")


def test_overflows_of_a_calibrating_loss_scale_raise_no_alarm():
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


def test_the_update_zscore_is_that_of_the_last_applied_update_over_the_learning_rate():
    rolling, lengths = RollingStats(), []
    for i in range(30):
        lr, length = 1e-3 * (i + 1), 2.0 + 0.1 * math.sin(i) + 3.0 * (i == 27)
        rolling.add(reading()._replace(update=length * lr, lr=lr))
        rolling.add(reading(applied=False)._replace(update=1e6, lr=lr))
        expected = (length - fmean(lengths)) / pstdev(lengths) if i >= 20 else 0.0
        assert rolling.metrics()["update/zscore"] == pytest.approx(expected, rel=1e-6)
        lengths.append(length)
    again = RollingStats()
    again.load_state_dict(rolling.state_dict())
    assert again.metrics() == rolling.metrics()
    again.load_state_dict({name: each for name, each in rolling.state_dict().items() if name != "updates"})
    assert "update/zscore" not in again.metrics(), "an older checkpoint has none"


def test_updates_that_are_not_measured_have_no_zscore():
    rolling = RollingStats()
    rolling.add(reading())
    assert "update/zscore" not in rolling.metrics()
