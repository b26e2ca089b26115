"""The value at which a spike begins: closed form, cold window, and values that must not count."""

import math

import numpy as np
import pytest

from stabletrain.stability.guard.limits import INPUTS, LARGEST, LOSS, NORM, Limit, Terms

WIDE = Terms(ratio=0.0, share=0.0, cold=3.0)


def limit_after(values, *, sigma=6.0, window=20, terms=WIDE):
    limit = Limit(sigma, window, terms)
    for value in values:
        limit.add(float(value))
    return limit.value


def test_it_is_sigma_standard_deviations_above_the_mean_of_the_window():
    values = np.random.default_rng(0).normal(2.0, 0.1, 100)
    assert limit_after(values, sigma=4.0) == pytest.approx(values[-20:].mean() + 4.0 * values[-20:].std(), rel=1e-12)


def test_a_window_without_spread_still_has_a_ratio():
    assert limit_after([2.0] * 40, terms=Terms(ratio=1.05, share=0.0, cold=3.0)) == pytest.approx(2.1)


def test_losses_near_zero_are_limited_by_a_share_of_the_first_loss():
    """A memorised data set has losses of 0.001, and one hard sample of 0.3 is no spike."""
    values = [2.3, *([0.001, 0.002] * 30)]
    assert limit_after(values, terms=LOSS) == pytest.approx(0.3 * 2.3)


@pytest.mark.parametrize(("terms", "cold"), [(LOSS, 3.0), (NORM, 100.0)])
def test_a_cold_window_is_protected_by_the_first_value(terms, cold):
    limit = Limit(6.0, 128, terms)
    assert limit.value == LARGEST, "nothing is known of the first step but that it is finite"
    for count in range(1, 64):
        limit.add(5.0)
        assert limit.value == cold * 5.0, count
    limit.add(5.0)
    assert limit.value == max(terms.ratio, terms.share) * 5.0, "half full: the window itself"


def test_sigma_infinite_limits_nothing():
    assert limit_after([2.0] * 100, sigma=math.inf, terms=LOSS) == LARGEST
    assert limit_after([2.0], sigma=math.inf, terms=LOSS) == LARGEST


def test_a_first_value_of_zero_protects_nothing_and_forbids_nothing():
    assert limit_after([0.0], terms=NORM) == LARGEST


def test_nan_and_infinity_are_not_below_the_largest():
    assert not math.nan <= LARGEST
    assert not math.inf <= LARGEST
    assert np.isfinite(np.float32(LARGEST))


def test_one_bad_first_batch_does_not_set_the_limit_of_the_inputs():
    limit = Limit(6.0, 128, INPUTS)
    for value in [2500.0, *([2.5] * 200)]:
        limit.add(value)
    assert limit.value == pytest.approx(50.0)
