"""The robust line: exact where it must be, and deaf to outliers and noise."""

import numpy as np
import pytest

from stabletrain.beside.forecast.series import trends

STEPS = np.array([0.0, 25, 50, 75, 100, 130, 150, 175, 200, 225, 250, 300])


def test_exact_lines_are_recovered():
    found = trends(STEPS, np.stack([2 + 0.5 * STEPS, -1 - 0.25 * STEPS]))
    np.testing.assert_allclose(found.slope, [0.5, -0.25])
    np.testing.assert_allclose(found.value, [2 + 0.5 * 300, -1 - 0.25 * 300])
    np.testing.assert_allclose([found.low, found.high], [[0.5, -0.25]] * 2)


def test_powers_of_the_steps_are_lines_over_a_logarithmic_time():
    powers = np.stack([3 * np.log(STEPS + 10), 1 - 0.5 * np.log(STEPS + 10)])
    found = trends(STEPS, powers, origin=-10.0)
    np.testing.assert_allclose(found.slope, [3, -0.5])
    np.testing.assert_allclose(found.at(990), [3 * np.log(1000), 1 - 0.5 * np.log(1000)])
    np.testing.assert_allclose(found.slope_now(), [3 / 310, -0.5 / 310])
    assert found.reach(0, 3 * np.log(500)) == pytest.approx(490)
    assert found.error == pytest.approx(0)
    assert trends(STEPS, powers).error[0] > 0.1, "no straight line over the steps"


def test_the_step_at_which_a_line_reaches_a_height():
    found = trends(STEPS, (2 + 0.5 * STEPS)[None])
    assert found.reach(0, 2 + 0.5 * 400) == pytest.approx(400)
    assert found.at(400) == pytest.approx(2 + 0.5 * 400)


def test_a_quarter_of_outliers_changes_no_line():
    line = 2 + 0.5 * STEPS
    line[[1, 6, 9]] += [1e6, -1e6, 1e6]
    found = trends(STEPS, line[None])
    assert found.slope[0] == pytest.approx(0.5)
    assert found.value[0] == pytest.approx(2 + 0.5 * 300)


def test_the_interval_contains_the_slope_of_a_noisy_line_and_0_without_a_trend():
    noise = np.random.default_rng(0).normal(size=(400, len(STEPS)))
    steep, flat = trends(STEPS, noise + 0.01 * STEPS), trends(STEPS, noise)
    for found, slope in ((steep, 0.01), (flat, 0.0)):
        assert (found.low <= found.slope).all()
        assert (found.slope <= found.high).all()
        assert 0.75 <= np.mean((found.low <= slope) & (slope <= found.high)) <= 0.9
