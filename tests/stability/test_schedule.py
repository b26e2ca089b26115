"""The learning rate by step number, at its turning points."""

import math

import pytest

from stabletrain.errors import ConfigError
from stabletrain.stability.schedule import (
    WSD,
    Constant,
    Cosine,
    CosineWarmup,
    LearningRate,
    LinearWarmup,
    NoWarmup,
    Step,
)


def test_linear_warmup_rises_in_equal_steps_and_stays():
    rate = LearningRate(LinearWarmup(4), Constant(), total=10)
    assert [rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warmup_without_a_length_takes_five_percent():
    rate = LearningRate(LinearWarmup(None), Constant(), total=200)
    assert rate(8) < 1
    assert rate(9) == 1
    assert LearningRate(LinearWarmup(None), Constant(), total=3)(0) == 1, (
        "a run too short to warm up starts at the peak"
    )


def test_cosine_is_at_the_peak_after_warmup_half_way_down_in_the_middle_and_at_the_ratio_at_the_end():
    rate = LearningRate(LinearWarmup(10), Cosine(0.1), total=110)
    assert rate(9) == rate(10) == 1
    assert rate(60) == pytest.approx(0.55)
    assert rate(110) == pytest.approx(0.1)
    assert rate(1000) == pytest.approx(0.1), "steps past the end stay at the end's rate"
    assert all(rate(s) > rate(s + 1) for s in range(10, 110))


def test_cosine_warmup_is_half_a_cosine_that_ends_at_the_peak():
    rate = LearningRate(CosineWarmup(8), Constant(), total=20)
    for step in range(8):
        assert rate(step) == pytest.approx(math.sin(math.pi * (step + 1) / 16) ** 2), "(1 - cos x) / 2 = sin^2 (x / 2)"
    assert rate(3) == pytest.approx(0.5), "half-way up at half-time"
    assert rate(7) == rate(8) == 1


@pytest.mark.parametrize("shape", ["sqrt", "linear"])
def test_wsd_stays_at_the_peak_and_decays_in_its_last_share(shape):
    rate = LearningRate(LinearWarmup(10), WSD(decay_share=0.25, final_ratio=0.1, shape=shape), total=110)
    assert {rate(step) for step in range(9, 86)} == {1.0}
    assert rate(85 + 16) == pytest.approx(0.1 + 0.9 * {"sqrt": 1 - 0.8, "linear": 1 - 0.64}[shape])
    assert rate(110) == pytest.approx(0.1)
    assert all(rate(s) > rate(s + 1) for s in range(85, 110))


def test_step_falls_by_gamma_at_each_milestone_and_nowhere_else():
    rate = LearningRate(NoWarmup(), Step(milestones=[0.5, 0.75], gamma=0.1), total=64)
    assert {rate(step) for step in range(32)} == {1.0}
    assert {rate(step) for step in range(32, 48)} == {0.1}
    assert {round(rate(step), 12) for step in range(48, 64)} == {0.01}


def test_no_warmup_and_constant_are_one_everywhere():
    rate = LearningRate(NoWarmup(), Constant(), total=5)
    assert {rate(step) for step in range(5)} == {1.0}


@pytest.mark.parametrize("steps", [10, 11])
def test_a_warmup_that_never_ends_is_refused_with_both_numbers(steps):
    with pytest.raises(ConfigError, match=rf"warmup\.steps={steps} >= steps=10: .* lower warmup\.steps"):
        LearningRate(LinearWarmup(steps), Cosine(0.1), total=10)
