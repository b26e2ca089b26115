"""The value at which a spike begins: closed form, cold window, and values that must not count."""

import math

import numpy as np
import pytest

from stabletrain.errors import ConfigError
from stabletrain.guard.policy.limits import (
    INPUTS,
    LARGEST,
    LARGEST_NORM,
    LOSS,
    NORM,
    RECENT,
    Limit,
    LimitFactors,
    Limits,
)
from tests.guard.policy.given import reading

WIDE = LimitFactors(ratio=0.0, share=0.0, cold=3.0)


def limit_after(values, *, sigma=6.0, window=20, terms=WIDE):
    limit = Limit(sigma, window, terms)
    for value in values:
        limit.add(float(value))
    return limit.value


def test_it_is_sigma_standard_deviations_above_the_mean_of_the_window():
    values = np.random.default_rng(0).normal(2.0, 0.1, 100)
    assert limit_after(values, sigma=4.0) == pytest.approx(values[-20:].mean() + 4.0 * values[-20:].std(), rel=1e-12)


def test_a_window_without_spread_still_has_a_ratio():
    assert limit_after([2.0] * 40, terms=LimitFactors(ratio=1.05, share=0.0, cold=3.0)) == pytest.approx(2.1)


def test_losses_near_zero_are_limited_by_a_share_of_the_first_loss():
    """A memorised data set has losses of 0.001, and one hard sample of 0.3 is no spike."""
    values = [2.3, *([0.001, 0.002] * 30)]
    assert limit_after(values, terms=LOSS) == pytest.approx(0.3 * 2.3)


@pytest.mark.parametrize("terms", [LOSS, NORM])
def test_a_cold_window_judges_by_the_first_value_and_ever_more_by_the_recent_ones(terms):
    limit = Limit(6.0, 128, terms)
    assert limit.value == terms.largest, "nothing is known of the first step but that it is finite"
    before = math.inf
    for count in range(1, 64):
        limit.add(5.0)
        expected = 5.0 * terms.cold ** math.sqrt(terms.prior / (terms.prior + count - 1))
        assert limit.value == pytest.approx(expected, rel=1e-12), count
        assert limit.value < before
        before = limit.value
    limit.add(5.0)
    assert limit.value == max(terms.ratio, terms.share) * 5.0, "half full: the window itself"


def test_the_cold_limit_in_closed_form():
    """Median and changes of the last 16 logarithms; the prior counts as 8 steps beside the 39 changes."""
    values = np.exp(np.random.default_rng(0).normal(1.0, 0.1, 40)) - np.arange(40) / 40
    logs = np.log(values[-RECENT:])
    spread = 1.4826 / math.sqrt(2) * np.median(np.abs(np.diff(logs)))
    std = math.sqrt((8 * (math.log(3) / 6) ** 2 + 39 * spread**2) / (8 + 39))
    expected = math.exp(np.median(logs) + 6 * std)
    assert limit_after(values, window=128, terms=LOSS) == pytest.approx(expected, rel=1e-12)


def test_a_trend_and_an_outlier_do_not_widen_the_cold_limit():
    falling = np.geomspace(5.5, 2.5, 30)
    bumped = [*falling[:25], 4.0, *falling[26:]]
    steps = np.abs(np.diff(np.log(falling)))[0]
    prior_alone = 3.0 ** math.sqrt(LOSS.prior / (LOSS.prior + 29))
    typical = np.median(falling[-RECENT:])
    assert limit_after(falling, window=128, terms=LOSS) < typical * prior_alone * math.exp(7 * steps)
    assert limit_after(bumped, window=128, terms=LOSS) == pytest.approx(
        limit_after(falling, window=128, terms=LOSS), rel=0.03
    )


def test_a_batch_of_wrong_targets_at_step_30_is_a_spike():
    """Losses of a small GPT (tests/reliability/early_steps.py); 3 times the first loss is 18."""
    losses = np.interp(range(27), range(0, 28, 4), [5.99, 3.8, 3.48, 2.9, 3.14, 2.81, 2.94])
    assert 1.5 * losses[-1] < limit_after(losses, window=128, terms=LOSS) < 6 < 9.1 < 3 * losses[0]


def test_a_cold_limit_is_never_above_a_multiple_of_the_first_value():
    """Otherwise a loss that grows from step to step would take its limit with it."""
    growing = [5.0 * 1.1**step for step in range(40)]
    assert limit_after(growing, window=128, terms=LOSS) == LOSS.cold * 5.0


def test_a_cold_limit_takes_losses_of_0_and_is_at_least_a_share_of_the_first():
    memorised = [2.3, *([0.0, 1e-40, 1e-3] * 10)]
    assert limit_after(memorised, window=128, terms=LOSS) == pytest.approx(3.0 * 2.3), "they change wildly"
    assert limit_after([2.3, *([0.0] * 30)], window=128, terms=LOSS) == pytest.approx(0.3 * 2.3)


def test_a_checkpoint_continues_a_cold_window_with_the_same_limit():
    """Its values are all that the cold limit is made of: a checkpoint of an earlier version has them too."""
    values = np.random.default_rng(0).normal(3.0, 0.1, 40).tolist()
    old, new = Limit(6.0, 128, LOSS), Limit(6.0, 128, LOSS)
    for value in values[:25]:
        old.add(value)
    assert old.state_dict().keys() == {"window", "first"}
    new.load_state_dict(old.state_dict())
    for value in values[25:]:
        old.add(value)
        new.add(value)
    assert new.value == old.value


def test_sigma_infinite_limits_nothing():
    assert limit_after([2.0] * 100, sigma=math.inf, terms=LOSS) == LARGEST
    assert limit_after([2.0], sigma=math.inf, terms=LOSS) == LARGEST


def test_a_first_value_of_zero_protects_nothing_and_forbids_nothing():
    assert limit_after([0.0], terms=NORM) == LARGEST_NORM


@pytest.mark.parametrize("sigma", [6.0, math.inf])
@pytest.mark.parametrize("values", [[], [0.0], [9e17], [9e17] * 100, [1e-30, 9e17]])
def test_no_gradient_norm_is_allowed_that_a_second_moment_cannot_hold(sigma, values):
    assert limit_after(values, sigma=sigma, terms=NORM) <= LARGEST_NORM
    limits = Limits(sigma, 128)
    for value in values:
        limits.norm.add(value)
    loaded = Limits(sigma, 128)
    loaded.load_state_dict(limits.state_dict())
    assert loaded.norm.value == limits.norm.value <= LARGEST_NORM


def test_nan_and_infinity_are_not_below_the_largest():
    assert not math.nan <= LARGEST
    assert not math.inf <= LARGEST
    assert np.isfinite(np.float32(LARGEST))


def test_one_bad_first_batch_does_not_set_the_limit_of_the_inputs():
    limit = Limit(6.0, 128, INPUTS)
    for value in [2500.0, *([2.5] * 200)]:
        limit.add(value)
    assert limit.value == pytest.approx(50.0)


def test_a_negative_loss_has_no_multiples():
    limits = Limits(6.0, 40)
    for step in range(1, 25):
        limits.add(reading(step=step, loss=-10.0 - step % 2))
        assert limits.loss.size == LARGEST
        if step < limits.cold_steps:
            assert limits.loss.value == LARGEST
    assert -10 < limits.loss.value < 0, "mean + sigma std of values near -10.5"


def test_a_positive_loss_keeps_its_limits_and_its_size():
    limits = Limits(6.0, 40)
    limits.add(reading(loss=2.0))
    assert limits.loss.size == limits.loss.value == 6.0


@pytest.mark.parametrize("values", [[-0.05], [-0.05, -2.0, -2.5], [1.4, 0.2, -0.6]])
def test_a_loss_that_is_below_0_is_no_spike_while_the_window_is_cold(values):
    """A likelihood of numbers may be above 1; multiples of such a loss, and its logarithm, say nothing."""
    assert limit_after(values, window=128, terms=LOSS) == LARGEST


def test_a_loss_that_is_below_0_has_the_limit_of_its_window():
    values = np.random.default_rng(0).normal(-2.0, 0.1, 100)
    expected = values[-20:].mean() + 4.0 * values[-20:].std()
    assert limit_after(values, sigma=4.0, terms=LimitFactors(ratio=1.05, share=0.0, cold=3.0)) == pytest.approx(
        expected
    )


@pytest.mark.parametrize("sigma", [1e-320, 0.5, 0.0, -1.0, math.nan])
def test_a_sigma_below_one_is_refused(sigma):
    with pytest.raises(ConfigError, match=r"^guard.sigma=.* is below 1: .*6 is customary"):
        Limits(sigma, 128)
