"""The change-point test: what is a change, since when, and that it goes on exactly where a checkpoint left it."""

import json
import random

import pytest

from stabletrain.monitors.change_point import ALLOWANCE, LARGEST, ChangePoint, median, threshold

NOISE = [random.Random(step).gauss(0, 1) for step in range(400)]


def first_change(values, test=None, floor=0.0):
    """The number of the value at which the test sees a change, from 1, and since when; None if it sees none."""
    test = test or ChangePoint(threshold(0.1))
    for step, value in enumerate(values, 1):
        if test.add(step, value, floor) > 1:
            return step, test.since
    return None


def falling(count=400):
    """A loss that falls ever more slowly."""
    return [2 + 3 * (1 + step / 30) ** -0.5 + 0.1 * NOISE[step] for step in range(count)]


def test_a_shift_by_a_few_deviations_is_seen_within_a_few_values_and_dated():
    found = first_change([value + 0.4 * (step >= 200) for step, value in enumerate(falling())])
    assert found is not None
    assert 200 < found[0] <= 215
    assert 190 <= found[1] <= 203


@pytest.mark.parametrize(
    "values",
    [
        falling(),
        [value - 0.3 * (step >= 200) for step, value in enumerate(falling())],  # decay: the loss falls faster
        [value + 100 * (step % 60 == 50) for step, value in enumerate(falling())],  # single outliers
        [0.0] * 400,
    ],
    ids=["fall", "decay", "outliers", "constant"],
)
def test_a_clean_loss_raises_nothing(values):
    assert first_change(values, ChangePoint(threshold(0.1), down=False)) is None


def test_a_fall_is_a_change_only_if_it_is_asked_for():
    values = [0.1 * NOISE[step] - (step >= 200) for step in range(300)]
    assert first_change(values, ChangePoint(10, down=False)) is None
    assert first_change(values, ChangePoint(10, up=False)) is not None


def test_a_change_below_the_floor_is_tolerated_for_ever():
    values = [0.01 * NOISE[step] + 0.1 * (step >= 200) for step in range(400)]
    assert first_change(values) is not None
    assert first_change(values, floor=0.1) is None


def test_the_sum_is_that_of_the_formula():
    test = ChangePoint(1000)
    for step in range(100):
        test.add(step, 0.0)
    sums = [1000 * test.add(100 + i, 50.0) for i in range(3)]
    assert sums == pytest.approx([LARGEST - ALLOWANCE, 2 * (LARGEST - ALLOWANCE), 3 * (LARGEST - ALLOWANCE)])
    assert (test.since, test.shift) == (100, 50.0)


def test_fewer_false_alarms_need_a_higher_threshold():
    assert threshold(0.01) > threshold(0.1) > threshold(1)
    assert threshold(1e9) == LARGEST


def test_a_restored_test_goes_on_as_if_it_had_not_stopped():
    values = [value + 0.3 * (step >= 200) for step, value in enumerate(falling())]
    whole, second = ChangePoint(500), ChangePoint(500)
    for cut in (20, 60, 199, 210):
        first = ChangePoint(500)
        for step in range(cut):
            first.add(step, values[step])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = [second.add(step, values[step]) for step in range(cut, 300)]
        whole.reset()
        assert rest == [whole.add(step, values[step]) for step in range(300)][cut:]


def test_medians():
    assert (median([3.0, 1.0, 2.0]), median([4.0, 1.0, 2.0, 3.0])) == (2.0, 2.5)
