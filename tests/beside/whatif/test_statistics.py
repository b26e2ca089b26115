"""The interval of a paired difference: closed forms, and its coverage of autocorrelated values."""

import math

import numpy as np
import pytest

from stabletrain.beside.comparison.intervals import STUDENT, Interval, student
from stabletrain.beside.whatif.statistics import MAX_BLOCKS, block_means, interval, paired


def test_block_means_are_means_of_neighbours():
    assert block_means([1, 3, 5, 7, 20], 2).tolist() == [3.0, 13.5]
    assert block_means(range(40), 4).tolist() == [4.5, 14.5, 24.5, 34.5]


def test_the_interval_is_students_over_the_block_means():
    values = [0.0, 2.0] * 4 + [4.0, 6.0] * 4 + [1.0, 3.0] * 4 + [5.0, 7.0] * 4  # 8 in each of 4 shapes, 32 in all
    means = block_means(values, 8)
    half = 2.3646 * means.std(ddof=1) / math.sqrt(8)
    found = interval(values)
    assert found.mean == np.mean(values)
    assert found == pytest.approx((np.mean(values), np.mean(values) - half, np.mean(values) + half, 32))


@pytest.mark.parametrize("degrees", STUDENT)
def test_the_quantiles_are_students(degrees):
    # By its density: the part below the quantile, over the middle 95 %.
    x = np.linspace(-STUDENT[degrees], STUDENT[degrees], 200_001)
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    inside = float(((density[1:] + density[:-1]) / 2 * np.diff(x)).sum())
    assert inside == pytest.approx(0.95, abs=1e-5)


def test_too_few_values_have_no_interval():
    assert interval([1.0] * 15)[1:3] == (-math.inf, math.inf)
    assert not interval([1.0] * 15).excludes_zero
    assert interval([1.0] * 16).excludes_zero
    assert math.isnan(interval([]).mean)


def test_an_interval_excludes_zero_on_either_side():
    assert Interval(1, 0.5, 1.5, 9).excludes_zero
    assert Interval(-1, -1.5, -0.5, 9).excludes_zero
    assert not Interval(0.1, -0.5, 0.7, 9).excludes_zero


def test_autocorrelation_widens_the_interval_and_keeps_its_coverage():
    random = np.random.default_rng(0)
    inside, plain = 0, 0
    for _ in range(400):  # AR(1) of mean 0, whose neighbours correlate by 0.8
        values = np.zeros(400)
        for t in range(1, 400):
            values[t] = 0.8 * values[t - 1] + random.normal()
        found = interval(values)
        inside += found.low <= 0 <= found.high
        plain += abs(values.mean()) <= 1.96 * values.std(ddof=1) / 20
    assert inside / 400 > 0.88
    assert plain / 400 < 0.6  # what the usual standard error would give
    assert MAX_BLOCKS == 10


def test_only_batches_that_both_have_read_are_paired():
    one = dict.fromkeys(range(40), 2.0)
    other = dict.fromkeys(range(20, 60), 1.5)
    assert paired(one, other) == Interval(0.5, 0.5, 0.5, 20)
    assert paired(one, {}).count == 0


@pytest.mark.parametrize("degrees", [10, 19, 29, 99])
def test_the_quantiles_above_the_table_are_students(degrees):
    x = np.linspace(-student(degrees), student(degrees), 200_001)
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert float(((density[1:] + density[:-1]) / 2 * np.diff(x)).sum()) == pytest.approx(0.95, abs=2e-5)


def test_the_block_means_of_seeds_are_pooled():
    random = np.random.default_rng(0)
    one, other = random.normal(size=100), random.normal(size=60)
    means = np.concatenate([block_means(one, 10), block_means(other, 10)])
    half = 2.0930 * means.std(ddof=1) / math.sqrt(20)
    mean = np.concatenate([one, other]).mean()
    assert interval(one, other) == pytest.approx((mean, mean - half, mean + half, 160), abs=1e-4)
    assert interval(one, []) == interval(one), "a seed without values is left out"
    assert interval(one, other[:15])[1:3] == (-math.inf, math.inf)
