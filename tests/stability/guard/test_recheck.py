"""What counts as a difference, how a limit is learnt, and which optimizers are repeated."""

import math

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.stability.guard import SkipGuard
from stabletrain.stability.guard.comparing import ratio, sums
from stabletrain.stability.guard.recheck import FACTOR, FIRST, Bound, Recheck, recheck_every
from stabletrain.stability.guard.repeats import next_tensor, put_back_attributes, tensor_by_tensor
from tests.stability.guard.given import reading


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, -2.0], [1.0, -2.0], 0.0),
        ([1.0, -2.0], [1.5, -2.0], 0.25),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [0.0, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([1.0, 1.0], [math.inf, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_a_difference_is_relative_to_the_largest_value_and_equal_bits_are_none(first, second, expected):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert float(ratio(torch.tensor(first, dtype=dtype), torch.tensor(second, dtype=dtype))) == expected


def test_bits_that_differ_are_never_a_difference_of_0():
    assert 0 < float(ratio(torch.tensor([0.0]), torch.tensor([-0.0]))) < 1e-20
    assert float(ratio(torch.tensor([1e-45]), torch.tensor([0.0]))) > 0
    assert float(ratio(torch.tensor([3e38, 0.0]), torch.tensor([3e38, 1e-45]))) > 0
    assert float(ratio(torch.tensor([1.0]), None)) == math.inf


def test_the_sum_of_bits_differs_if_one_bit_does():
    tensor = torch.randn(5, 7)
    other = tensor.clone()
    other.view(torch.int32)[3, 3] ^= 1
    assert not torch.equal(sums([tensor], tensor.device), sums([other], tensor.device))
    assert torch.equal(sums([tensor.T, None], tensor.device), sums([tensor, None], tensor.device))


def test_equal_bits_are_expected_until_it_is_known_that_they_vary():
    bound = Bound()
    assert bound.limit(True, 0.1) == 0
    bound.varies = True
    for number in range(FIRST):
        assert math.isfinite(bound.limit(True, 0.1)), "NaN on one side only is always a difference"
        assert bound.limit(True, 0.1) > 1e30
        bound.learn(0.5 + number, True)
    bound.learn(100.0, True)
    assert bound.limit(True, 0.1) == FACTOR * (0.5 + FIRST - 1)
    assert bound.agreed == 0


def test_a_limit_is_learnt_where_bits_may_differ_and_has_a_floor():
    bound = Bound()
    for _ in range(FIRST):
        bound.learn(0.0, False)
    assert bound.limit(False, 0.25) == FACTOR * 0.25


def test_what_was_learnt_survives_a_checkpoint():
    guard = SkipGuard()
    guard.recheck.bounds["update"].learn(0.5, False)
    guard.recheck.bounds["gradient"].learn(0.0, True)
    guard.recheck.vary("gradient")
    other = SkipGuard()
    other.load_state_dict(guard.state_dict())
    assert other.recheck.bounds == guard.recheck.bounds
    other.load_state_dict({"skips": {}})  # of an older version, which learnt nothing
    assert other.recheck.bounds == SkipGuard().recheck.bounds


def test_a_step_that_is_not_due_teaches_nothing():
    recheck = Recheck(5)
    recheck.compared = {"gradient": None, "update": None}
    recheck.learn(reading(step=7))
    assert recheck.agreed("gradient") == 0
    recheck.learn(reading(step=10))
    assert recheck.agreed("gradient") == 1


def test_it_can_be_switched_off_and_not_be_negative():
    assert not recheck_every(0).due(0)
    assert [step for step in range(7) if recheck_every(3).due(step)] == [2, 5]
    with pytest.raises(ConfigError, match=r"guard\.recheck_every=-1 is below 0"):
        recheck_every(-1)


class Own(torch.optim.SGD):
    """An optimizer of the user's own, which may couple tensors."""


def test_only_optimizers_that_update_each_tensor_by_itself_are_repeated():
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    assert not tensor_by_tensor(Own(weights, lr=0.1))
    assert not tensor_by_tensor(torch.optim.LBFGS(weights))
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    assert tensor_by_tensor(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert not tensor_by_tensor(optimizer), "a hook may change what the step computes"


def test_weights_without_a_gradient_and_in_16_bits_have_no_turn():
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    weights.append(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    optimizer = torch.optim.SGD(weights, lr=0.1)
    assert next_tensor(optimizer, 0) is None
    for weight in (weights[0], weights[2], weights[3]):
        weight.grad = torch.ones_like(weight)
    turns = [next_tensor(optimizer, turn)[1] for turn in range(4)]
    assert [turn is weights[0] for turn in turns] == [True, False, True, False]
    assert [turn is weights[2] for turn in turns] == [False, True, False, True]


def test_attributes_are_put_back_and_tensors_left_alone():
    module = nn.BatchNorm1d(2)
    before = {**vars(module)}
    module.calls, module.eps = 3, 1.0
    module.register_buffer("more", torch.zeros(1))
    put_back_attributes(module, before)
    assert not hasattr(module, "calls")
    assert module.eps == 1e-5
    assert "more" in dict(module.named_buffers())
