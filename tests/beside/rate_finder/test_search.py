"""The rates that a search tries, on losses that are a formula of the rate."""

import math

import numpy as np
import pytest

from stabletrain.beside.rate_finder.peak import Trial
from stabletrain.beside.rate_finder.search import COARSE, MOST_COARSE, MOST_FINE, search

SEEDS = (0, 1)


class Made:
    """Trials of a model whose best rate is `best`, and that diverges above `limit`."""

    def __init__(self, best, limit=math.inf, noise=0.0):
        self.best, self.limit, self.noise, self.run = best, limit, noise, []
        self.rng = np.random.default_rng(0)

    def __call__(self, rate, seed, steps):
        # Below the best rate a loss falls in proportion to the rate, as that of a short run does.
        x = rate / self.best
        gain = x * math.exp(1 - x) if x < 1 else 1 / (1 + math.log(x) ** 2 / 4)
        loss = 5.0 - 3.0 * gain + 0.1 * seed + self.rng.normal(0, self.noise)
        self.run.append(Trial(rate, seed, steps, 5.0, math.inf if rate > self.limit else loss, steps, 0.0))
        return self.run[-1]


def found_by(made, middle, low=0.0, high=math.inf, steps=40, seeds=SEEDS):
    return search(made, middle, low, high, steps, seeds)


@pytest.mark.parametrize("away", [2.0**power for power in range(-12, 13)])
@pytest.mark.parametrize("limit", [math.inf, 3.0])
def test_the_peak_is_found_from_wherever_the_search_starts(away, limit):
    found = found_by(Made(1e-2, 1e-2 * limit), 1e-2 * away)
    assert 0.5 <= found.peak / 1e-2 <= 2
    assert found.learns


@pytest.mark.parametrize("seed", range(20))
def test_with_noise_it_is_found_within_a_factor_of_two(seed):
    made = Made(1e-2, noise=0.03)
    made.rng = np.random.default_rng(seed)
    assert 0.5 <= found_by(made, 1e-2 * 2.0 ** (seed % 9 - 4)).peak / 1e-2 <= 2


def test_a_search_that_starts_at_the_best_rate_takes_a_few_hundred_steps():
    made = Made(1e-2)
    found_by(made, 1e-2)
    assert sum(trial.done for trial in made.run) <= 400


def test_no_search_takes_more_trials_than_it_may():
    for made in (Made(1e-2, limit=0), Made(1e30), Made(1e-2, noise=3.0)):
        found = found_by(made, 1e-2)
        assert len(found.coarse) <= MOST_COARSE
        assert len(found.points) <= MOST_FINE
        assert len(made.run) == len(found.coarse) + len(found.fine)


def test_every_trial_is_of_another_rate_or_seed():
    found = found_by(Made(1e-2, noise=0.1), 1e-4)
    for each in (found.coarse, found.fine):
        assert len({(trial.rate, trial.seed) for trial in each}) == len(each)
    assert {trial.steps for trial in found.coarse} == {20}
    assert {trial.steps for trial in found.fine} == {40}


def test_neighbours_of_the_second_round_are_a_factor_of_two_apart():
    rates = [point.rate for point in found_by(Made(1e-2), 3e-3).points]
    assert len(rates) >= 3
    assert np.diff(np.log2(rates)) == pytest.approx(1)


def test_the_bounds_hold_and_a_best_rate_beyond_them_is_said_to_be_there():
    made = Made(1e-2)
    found = found_by(made, 1e-3, low=5e-4, high=2e-3)
    assert all(5e-4 <= trial.rate <= 2e-3 for trial in made.run)
    assert found.lowest.rate == 2e-3
    assert found.open_above
    assert not found.open_below


def test_if_every_rate_diverges_lower_ones_are_tried_and_nothing_is_learnt():
    made = Made(1e-2, limit=0)
    found = found_by(made, 1e-2)
    assert not found.learns
    assert max(trial.rate for trial in made.run) == 1e-2 * COARSE
    assert min(trial.rate for trial in made.run) < 1e-7


def test_rates_too_low_to_change_a_weight_are_left_behind():
    """In low precision every loss is that of the first step, and no rate is better than another."""

    def trial(rate, seed, steps):
        return Trial(rate, seed, steps, 5.0, 5.0 if rate < 1e-5 else Made(1e-2)(rate, seed, steps).loss, steps, 0.0)

    assert 0.5 <= search(trial, 1e-7, 0.0, math.inf, 40, SEEDS).peak / 1e-2 <= 2
