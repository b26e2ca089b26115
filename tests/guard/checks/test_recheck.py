"""What counts as a difference, how a limit is learnt, and which optimizers are repeated."""

import math

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.guard.checks.comparing import compare, sums
from stabletrain.guard.checks.recheck import LEARNING_REPEATS, LIMIT_FACTOR, Bound, Recheck, recheck_every
from stabletrain.guard.checks.repeats import (
    OneTensor,
    copied,
    next_tensor,
    over_ranks,
    results,
    tensor_by_tensor,
)
from stabletrain.guard.policy import SkipGuard
from stabletrain.guard.policy.limits import LARGEST
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import TrainState
from tests.guard.policy.given import reading
from tests.trainer.given import make_run

CPU = torch.device("cpu")


def ratio(first, second):
    """The difference of one pair."""
    return compare([("it", first, second)], CPU).ratios


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, -2.0], [1.0, -2.0], 0.0),
        ([1.0, -2.0], [1.5, -2.0], 0.25),
        ([1.0, -2.0], [1.0, -8.0], 0.75),
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


def test_many_tensors_are_compared_at_once_and_only_the_second_are_overwritten():
    first = [torch.randn(3, 4), torch.randn(5).double(), None, torch.tensor([2, 4]), torch.randn(3, 4).T, None]
    second = [None if each is None else each.clone() for each in first]
    second[1][2] += first[1].abs().max()
    second[3][1] = 3
    second[5] = torch.ones(1)
    before = [None if each is None else each.clone() for each in first]
    compared = compare([*zip("abcdef", first, second, strict=True)], CPU)
    assert compared.ratios[[0, 2, 4]].tolist() == [0.0, 0.0, 0.0]
    assert 0.4 < compared.ratios[1] <= 1.0
    assert (compared.ratios[3], compared.ratios[5]) == (0.25, math.inf)
    assert compared.ratios.dtype == torch.float32
    assert torch.equal(compared.first[:2], sums(first[:2], CPU))
    for each, its in zip(first, before, strict=True):
        assert each is its is None or torch.equal(each, its)


def numbers(*values):
    return torch.tensor(values)


def learnt(*ratios, exact=False):
    """A bound that has learnt from the same differences `LEARNING_REPEATS` times."""
    bound = Bound()
    for _ in range(LEARNING_REPEATS):
        bound.learn(max(ratios), numbers(*ratios), exact)
    return bound


def judged(bound, *ratios, eps=1e-7):
    """Whether differences are a fault, where bits may differ."""
    limits = bound.limits(numbers(*ratios), False, eps)
    return bool(bound.judged(numbers(*ratios), limits, False) > bound.limit(False))


def test_equal_bits_are_expected_until_it_is_known_that_they_vary():
    bound = Bound()
    assert bound.limit(True) == 0
    bound.varies = True
    for number in range(LEARNING_REPEATS):
        assert bound.limit(True) == LARGEST, "NaN on one side only is always a difference"
        assert bound.judged(numbers(0.5, math.inf), bound.limits(numbers(0.0, 0.0), True, 0.1), True) > LARGEST
        bound.learn(0.5 + number, numbers(0.5 + number), True)
    bound.learn(100.0, numbers(100.0), True)
    assert bound.limit(True) == 1.0
    assert bound.limits(numbers(0.0), True, 0.1).tolist() == [LIMIT_FACTOR * (0.5 + LEARNING_REPEATS - 1)]
    assert bound.agreed == 0


def test_a_limit_is_learnt_where_bits_may_differ_and_has_a_floor():
    assert learnt(0.0).limits(numbers(0.0), False, 0.25).tolist() == [LIMIT_FACTOR * 0.25]
    assert learnt(3e38).limits(numbers(0.0), False, 0.25).isfinite().all()


def test_a_tensor_whose_gradient_is_noise_hides_no_error_of_another_and_is_none_itself():
    bound = learnt(1.25, 1e-3)
    assert not judged(bound, 2.0, 4e-3)
    assert judged(bound, 1.0, 0.32), "an error that the noise of the first tensor used to hide"
    assert judged(bound, 0.0, 1.001 * LIMIT_FACTOR * 1e-3)
    assert judged(bound, math.inf, 0.0)


class WithAnother(SingleProcess):
    """This rank and another, which has these numbers."""

    def __init__(self, *numbers):
        super().__init__()
        self.numbers = [torch.tensor(each) for each in numbers]

    def max_over_ranks_(self, values):
        for value, other in zip(values, self.numbers, strict=True):
            value.copy_(torch.maximum(value, other))


def test_all_ranks_learn_the_same_limits_and_each_knows_its_own_differences():
    recheck = Recheck(1)
    recheck.exact = False
    pairs = [("a", torch.ones(2), torch.tensor([1.0, 0.5])), ("b", torch.ones(2), torch.ones(2))]
    compared = compare(pairs, CPU)
    judge = recheck.judge_of(0, "gradient", 1e-7)
    tools = make_run(parallel=WithAnother([0.25, 0.125], [0.0])).tools
    number = over_ranks(compared, compared.ratios, judge, tools.parallel)
    assert float(number) == 0.5
    recheck.learn(reading(step=1)._replace(recheck=float(number)))
    assert recheck.bounds["gradient"].largest.tolist() == [0.5, 0.125]
    assert recheck.compared["gradient"].ratios.tolist() == [0.5, 0.0]
    tools = make_run(parallel=WithAnother([0.0, 0.0], [1.0])).tools
    number = over_ranks(compared, compared.ratios, judge, tools.parallel)
    assert float(number) == -1.0, "the other rank had too little memory"
    recheck.learn(reading(step=1)._replace(recheck=float(number)))
    assert recheck.bounds["gradient"].learnt == 1


def test_other_tensors_are_learnt_anew():
    bound = learnt(1.0, 1.0)
    bound.fit(numbers(0.0, 0.0))
    assert bound.learnt == LEARNING_REPEATS
    bound.fit(numbers(0.0, 0.0, 0.0))
    assert (bound.learnt, bound.largest) == (0, None)


def test_what_was_learnt_survives_a_checkpoint():
    guard = SkipGuard()
    guard.recheck.bounds["update"].learn(0.5, numbers(0.5), False)
    guard.recheck.bounds["gradient"].learn(0.0, numbers(0.0, 0.0), True)
    guard.recheck.learn_limit("gradient")
    guard.recheck.bounds["gradient"].learn(0.25, numbers(0.25, 0.125), True)
    other = SkipGuard()
    other.load_state_dict(guard.state_dict())
    assert other.state_dict() == {**guard.state_dict(), "recheck": other.recheck.state_dict()}
    assert other.recheck.bounds["gradient"].largest.tolist() == [0.25, 0.125]
    assert other.recheck.bounds["update"].largest.tolist() == [0.5]
    assert (other.recheck.varies, other.recheck.agreed("gradient")) == (True, 1)
    other.load_state_dict({"skips": {}})  # of an older version, which learnt nothing
    assert other.recheck.bounds == SkipGuard().recheck.bounds


def test_the_one_limit_of_an_older_checkpoint_counts_until_there_is_one_for_each_tensor():
    recheck = Recheck(5)
    old = {"varies": False, "agreed": 3, "seen": [0.25] * (LEARNING_REPEATS - 1) + [0.5]}
    recheck.load_state_dict({"gradient": old, "update": {**old, "seen": [0.5]}, "stopped": False})
    bound = recheck.bounds["gradient"]
    assert recheck.agreed("gradient") == 3
    assert not judged(bound, 3.9, 0.0)
    assert judged(bound, 4.1, 0.0)
    for _ in range(LEARNING_REPEATS):
        assert recheck.has_repeated("gradient")
        bound.learn(0.5, numbers(0.5, 1e-3), False)
    assert judged(bound, 0.5, 0.32)
    assert recheck.bounds["update"].limit(False) == LARGEST, "that one had not learnt enough"


def test_a_difference_is_judged_by_the_limit_of_its_own_step():
    recheck = Recheck(1)
    recheck.exact = False
    pairs = [("noise", torch.ones(2), -torch.ones(2)), ("weight", torch.ones(2), torch.ones(2))]
    for step in range(LEARNING_REPEATS + 1):
        judge = recheck.judge_of(step, "gradient", 1e-7)
        compared = compare([(name, a, b.clone()) for name, a, b in pairs], CPU)
        number = float(judge(compared, compared.ratios))
        each = reading(step=step + 1)._replace(recheck=number)
        recheck.learn(each)
        assert not recheck.differing_part(each), "of the last that is learnt too"
    assert (number, recheck.limit("gradient")) == (2.0 / (2.0 * LIMIT_FACTOR), 1.0)
    assert recheck.bounds["gradient"].learnt == LEARNING_REPEATS


def test_a_step_that_is_not_due_teaches_nothing():
    recheck = Recheck(5)
    recheck.compared = {"gradient": compare([("it", torch.ones(1), torch.ones(1))], CPU)}
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


def test_without_a_turn_the_largest_tensor_is_chosen():
    weights = [nn.Parameter(torch.zeros(size)) for size in (2, 5, 3)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    assert next_tensor(optimizer, None)[1] is weights[1]


def test_after_as_many_repetitions_as_there_are_tensors_each_had_its_turn():
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for weight in model:
        weight.grad = torch.ones_like(weight)
    recheck, repeated = Recheck(2), []
    for step in (1, 3, 5, 7):
        repeat = recheck.of_update(TrainState(model, optimizer, step), SingleProcess())
        optimizer.step()
        assert repeat.update(lambda each: each.step()) == 0
        repeated += recheck.compared["update"].names
    assert sorted(repeated) == ["0", "1", "2", "3"]


BUCKET = torch.randn(4096)
VIEWS = {
    "aligned": BUCKET[128:228],
    "between": BUCKET[3:103],
    "matrix": BUCKET[1:101].view(10, 10),
    "transposed": BUCKET[6:106].view(10, 10).T,
    "gaps": BUCKET[5:905].view(30, 30)[3:9, 2:28:5],
    "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "16 bits": BUCKET.bfloat16()[7:31],
    "float64": BUCKET.double()[7:31],
    "a number": BUCKET[9],
    "empty": BUCKET[9:9],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_is_laid_out_and_aligned_as_its_original(name):
    tensor = VIEWS[name]
    for copy in (copied(tensor), copied(copied(tensor))):
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage()._cdata != tensor.untyped_storage()._cdata
        assert (copy.stride(), copy.dtype) == (tensor.stride(), tensor.dtype)
        if tensor.numel():
            assert copy.data_ptr() % 64 == tensor.data_ptr() % 64, "as far as memory on a CPU is aligned"
            assert copy.storage_offset() % 128 == tensor.storage_offset() % 128, "and on a card"


def test_a_copy_of_an_expanded_tensor_is_one():
    assert torch.equal(copied(torch.ones(1).expand(3)), torch.ones(3))


def test_an_update_is_computed_again_from_tensors_aligned_as_the_optimizers_own():
    memory = torch.randn(64)
    weight = nn.Parameter(memory[3:19])
    weight.grad = memory[21:37]
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.zeros(40)[7:23].copy_(optimizer.state[weight]["exp_avg"])
    seen = {}

    def apply(alone):
        (copy,) = alone.param_groups[0]["params"]
        seen.update(weight=copy, gradient=copy.grad, **alone.state[copy])
        alone.step()

    before = OneTensor.of(optimizer, optimizer.param_groups[0], weight)
    second = before.updated(optimizer, apply)
    originals = {"weight": weight, "gradient": weight.grad, **optimizer.state[weight]}
    assert seen.keys() == originals.keys()
    for name, original in originals.items():
        assert seen[name].data_ptr() % 64 == original.data_ptr() % 64, name
        assert seen[name].data_ptr() != original.data_ptr()
    optimizer.step()
    for name, first in results(optimizer, weight).items():
        assert torch.equal(first, second[name])


def test_memory_that_does_not_suffice_ends_all_repetitions_of_this_process_once():
    recheck = Recheck(5)
    assert not recheck.runs_out_of_memory(reading()._replace(recheck=3.0))
    assert recheck.runs_out_of_memory(reading()._replace(recheck_update=-1.0))
    assert not recheck.runs_out_of_memory(reading()._replace(recheck=-1.0)), "it is said once"
    recheck.load_state_dict(Recheck(5).state_dict())  # a rollback within this process
    recheck.rehearse(1)
    assert not any(recheck.repeats(step) for step in range(10))
    other = Recheck(5)
    other.load_state_dict(recheck.state_dict())
    assert other.due(4), "another process may have more"


def test_why_ranks_cannot_be_compared_is_told_once():
    recheck = Recheck(every=1, across=True)
    assert recheck.news() == ""
    recheck._keep("they draw other numbers")
    recheck._keep("they draw other numbers")
    assert [recheck.news(), recheck.news()] == ["they draw other numbers", ""]


def test_a_rehearsal_is_repeated_once_and_not_due():
    recheck = Recheck(5)
    recheck.rehearse(1)
    assert [step for step in range(10) if recheck.repeats(step)] == [1, 4, 9]
    assert [step for step in range(10) if recheck.due(step)] == [4, 9]
