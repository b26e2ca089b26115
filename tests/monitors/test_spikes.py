"""Spikes against a naive loop in exact arithmetic, and the corners of the definition."""

import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from stabletrain.monitors.spikes import Spikes, spike_score


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
    values = noisy(window, offset=offset)
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


def test_state_goes_through_json_and_continues_exactly():
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


def test_mean_and_limit_are_those_of_the_window_as_it_now_is():
    spikes, values = Spikes(window=32, sigma=3.0, minimum=2), noisy(3, 80)
    for number, value in enumerate(values, 1):
        spikes.add(value)
        assert spikes.mean == np.mean(values[max(number - 32, 0) : number])
    other = Spikes(window=32, sigma=3.0, minimum=2)
    for value in (1.0, 2.0):
        other.add(value)
    assert other.mean == 1.5
    other.load_state_dict(spikes.state_dict())
    assert (other.mean, other.limit) == (spikes.mean, spikes.limit)


@pytest.mark.parametrize("wrong", [{"window": 10}, {"minimum": 1}, {"sigma": 0.0}])
def test_bounds(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Spikes(**wrong)
