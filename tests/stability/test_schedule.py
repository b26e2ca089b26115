"""What the step number decides, at its turning points: learning rate, weight decay, momentum."""

import math

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.stability.schedule import (
    WSD,
    Constant,
    Cosine,
    CosineWarmup,
    LearningRate,
    LinearWarmup,
    NoWarmup,
    Schedule,
    Step,
    momentum_at,
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


# ---- weight decay and momentum


def adamw(*decays, kind=torch.optim.AdamW):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": decay} for decay in decays]
    return kind(groups, lr=0.1)


def decays_of(rate, optimizer, steps, lowered=1.0):
    """Returns the weight decay of every group at every step."""
    found = []
    for step in steps:
        rate.set_(optimizer.param_groups, step, lowered)
        found.append([group["weight_decay"] for group in optimizer.param_groups])
    return found


def test_constant_weight_decay_leaves_the_groups_as_they_are():
    optimizer, rate = adamw(0.2, 0.0), LearningRate(LinearWarmup(2), Cosine(0.1), 8)
    before = [{**group, "peak_lr": group["lr"]} for group in optimizer.param_groups]
    rate.attach(optimizer.param_groups)
    assert decays_of(rate, optimizer, range(8)) == [[0.2, 0.0]] * 8
    rate.set_(optimizer.param_groups, 1)  # the last step of the warmup
    assert optimizer.param_groups == before


def test_weight_decay_with_the_learning_rate_follows_it_also_after_a_rollback():
    optimizer, rate = adamw(0.2, 0.0), LearningRate(LinearWarmup(2), Cosine(0.1, weight_decay="with_lr"), 8)
    rate.attach(optimizer.param_groups)
    for lowered in (1.0, 0.25):
        expected = [[pytest.approx(0.2 * rate(step) * lowered), 0.0] for step in range(9)]
        assert decays_of(rate, optimizer, range(9), lowered) == expected
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * rate(8) * lowered)


@pytest.mark.parametrize(("final", "middle"), [(0.0, 0.1), (10.0, 1.1)])
def test_the_cosine_of_the_weight_decay_spans_the_run_and_ends_at_its_ratio(final, middle):
    """nanochat's falls to 0, DINO's rises tenfold; neither warms up or falls with the learning rate."""
    schedule = WSD(weight_decay="cosine", weight_decay_final_ratio=final)
    optimizer, rate = adamw(0.2, 0.0), LearningRate(LinearWarmup(3), schedule, 8)
    rate.attach(optimizer.param_groups)
    found = [decay for decay, none in decays_of(rate, optimizer, range(10), lowered=0.5)]
    assert found[0] == 0.2
    assert found[4] == pytest.approx(middle)
    assert found[8] == found[9] == pytest.approx(0.2 * final)
    assert sorted(found) == (found if final > 1 else found[::-1])


def test_steps_in_any_order_set_the_same_values():
    """So that a step that is replayed, or repeated after a rollback, has those that it had."""
    rate = LearningRate(LinearWarmup(3), Step(weight_decay="cosine"), 8)
    optimizer = adamw(0.2)
    rate.attach(optimizer.param_groups)
    forwards = decays_of(rate, optimizer, range(8))
    assert decays_of(rate, optimizer, [*range(8)][::-1]) == forwards[::-1]


@pytest.mark.parametrize("optimizer", [adamw(0.0, 0.0), torch.optim.Rprop([torch.nn.Parameter(torch.ones(1))])])
def test_a_schedule_of_a_weight_decay_that_there_is_not_is_refused(optimizer):
    with pytest.raises(ConfigError, match="no parameter group of the optimizer has a weight_decay above 0; fix: sch"):
        LearningRate(NoWarmup(), Constant(weight_decay="with_lr"), 8).attach(optimizer.param_groups)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight_decay": "linear"}, "is unknown: choose constant or with_lr or cosine"),
        ({"weight_decay": "cosine", "weight_decay_final_ratio": -1.0}, r"outside \[0, inf\)"),
        ({"weight_decay": "with_lr", "weight_decay_final_ratio": 2.0}, "does nothing with schedule.weight_decay=with_"),
    ],
)
@pytest.mark.parametrize("kind", [Constant, Cosine, WSD, Step])
def test_mistakes_in_the_weight_decays_schedule_are_refused_by_every_kind(kind, given, message):
    with pytest.raises(ConfigError, match=message):
        kind(**given)


def test_a_schedule_of_the_users_own_leaves_the_weight_decay_constant():
    class Own(Schedule):
        def factor(self, progress):
            return 1 - progress

    optimizer, rate = adamw(0.2), LearningRate(NoWarmup(), Own(), 4)
    rate.attach(optimizer.param_groups)
    assert decays_of(rate, optimizer, range(4)) == [[0.2]] * 4


def test_momentum_rises_stays_and_falls_back():
    """The numbers of modded-nanogpt: 0.85 to 0.95 in 300 steps, and back in the last 50."""
    found = [momentum_at(step, 1000, 0.95, 0.85, 300, 50) for step in (0, 150, 300, 950, 975, 1000, 2000)]
    assert found == pytest.approx([0.85, 0.9, 0.95, 0.95, 0.9, 0.85, 0.85])
    assert momentum_at(0, 1000, 0.95, 0.85, 0, 50) == momentum_at(999, 1000, 0.95, 0.85, 300, 0) == 0.95
    crossing = [momentum_at(step, 10, 1.0, 0.0, 10, 10) for step in range(11)]
    assert crossing == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0]), "too short for both lines"
