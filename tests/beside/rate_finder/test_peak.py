"""The peak from losses with noise: which rates are told apart, and which one is proposed."""

import math

import numpy as np
import pytest

from stabletrain.beside.rate_finder.peak import Trial, centre, clearly_above, noise, points, two_digits

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def trials(table, rates=RATES):
    """Trials that ended with these losses, `[rates][seeds]`; the first loss is 5."""
    return [
        Trial(rate, seed, 40, 5.0, float(loss), 40, 1.0)
        for rate, row in zip(rates, table, strict=True)
        for seed, loss in enumerate(row)
    ]


def curve(best, curvature=0.05, rates=RATES):
    """Losses by rate, with the lowest one, 2.0, at `best`; `curvature` is the rise at half and twice that rate."""
    return np.array([2.0 + curvature * math.log2(rate / best) ** 2 for rate in rates])


def drawn(seed, best, deviation, seeds=2):
    """The same with an own level for each seed, and with noise."""
    rng = np.random.default_rng(seed)
    level = rng.normal(0, 0.2, seeds)
    return curve(best)[:, None] + level + rng.normal(0, deviation, (len(RATES), seeds))


def plateau(found):
    return [point.rate for point in found if point.on_plateau]


def test_the_noise_is_what_rate_and_seed_do_not_explain():
    rng = np.random.default_rng(0)
    rest = rng.normal(0, 0.03, (200, 5))
    levels = rng.normal(0, 10, 200)[:, None] + rng.normal(0, 10, 5)
    deviation, degrees = noise((levels + rest).tolist())
    assert degrees == 199 * 4
    assert deviation == pytest.approx(0.03, rel=0.1)
    assert noise(levels.tolist())[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("table", [[], [[1.0, 2.0]], [[1.0], [2.0], [3.0]]])
def test_one_rate_or_one_seed_has_no_noise(table):
    deviation, degrees = noise(table)
    assert math.isnan(deviation)
    assert degrees == 0


def test_without_noise_the_lowest_rate_is_the_peak():
    found = points(trials(np.stack([curve(4e-3), curve(4e-3) + 0.3], axis=1)))
    assert plateau(found) == [4e-3]
    assert centre(found) == pytest.approx(4e-3)


def test_the_peak_is_the_centre_of_what_is_not_told_apart():
    found = points(trials([[2.5, 2.51], [2.0, 2.03], [2.02, 2.01], [2.5, 2.49], [9.0, 9.0]]))
    assert plateau(found) == [2e-3, 4e-3]
    assert centre(found) == pytest.approx(math.sqrt(8) * 1e-3)


def test_the_best_rate_is_on_the_plateau_as_often_as_the_interval_says():
    inside = [4e-3 in plateau(points(trials(drawn(seed, best=4e-3, deviation=0.05)))) for seed in range(400)]
    # 95 % for a pair of rates; the lowest of five is the best of several differences.
    assert np.mean(inside) > 0.9
    wide = [len(plateau(points(trials(drawn(seed, 4e-3, 0.1))))) for seed in range(100)]
    narrow = [len(plateau(points(trials(drawn(seed, 4e-3, 0.005))))) for seed in range(100)]
    assert np.mean(narrow) < 1.2 < np.mean(wide)


def test_more_seeds_tell_more_rates_apart():
    few, many = (
        np.mean([len(plateau(points(trials(drawn(seed, 4e-3, 0.05, seeds))))) for seed in range(100)])
        for seeds in (2, 8)
    )
    assert many < few


def test_scale_and_order_of_the_losses_change_nothing():
    table = drawn(3, 4e-3, 0.05)
    found = plateau(points(trials(table)))
    scaled = [
        Trial(each.rate, each.seed, 40, 7 * each.first, 7 * each.loss, 40, 1.0) for each in reversed(trials(table))
    ]
    assert plateau(points(scaled)) == found


def test_a_rate_that_diverges_is_told_apart_whatever_the_noise():
    found = points(trials([[2.0, 2.4], [2.4, 2.0], [2.2, math.inf], [2.0, 2.0], [math.inf, math.inf]]))
    assert [math.isinf(point.loss) for point in found] == [False, False, True, False, True]
    # 8e-3 is beyond the gap, and has the lowest loss: the others are not reached from it.
    assert plateau(found) == [8e-3]


def test_with_one_seed_nothing_is_said_of_the_noise():
    found = points(trials(curve(2e-3)[:, None]))
    assert plateau(found) == [2e-3]
    assert all(math.isnan(point.error) and math.isnan(point.margin) for point in found)


def test_high_rates_whose_losses_scatter_do_not_widen_the_interval():
    quiet = [[2.3, 2.3], [2.0, 2.001], [2.2, 2.2], [2.3, 2.3]]
    found = points(trials([*quiet, [3.5, 4.5]]))
    assert plateau(found) == [2e-3]
    assert found[0].margin < 0.1


@pytest.mark.parametrize(
    ("loss", "said"), [(2.0, False), (2.1, False), (2.2, True), (math.inf, True), (math.nextafter(2.0, 3.0), False)]
)
def test_clearly_above_is_a_share_of_the_gain(loss, said):
    assert clearly_above(loss, 2.0, 5.0) is said


def test_rates_that_gain_nothing_are_not_clearly_above_each_other():
    assert not clearly_above(5.0, 5.0, 5.0)


@pytest.mark.parametrize(("rate", "rounded"), [(0.0021213, 0.0021), (0.565, 0.56), (3e-3, 3e-3), (123.0, 120.0)])
def test_two_digits(rate, rounded):
    assert two_digits(rate) == rounded
