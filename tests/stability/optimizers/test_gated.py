"""Adam's moments behind a gate: their initial values, their updates, and that a closed gate changes no bit."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.stability.optimizers import SPAM, AdamW, StableAdamW
from stabletrain.stability.optimizers.gated import (
    LARGEST_GRADIENT,
    adam_update,
    advance_,
    bias_correction,
    cautious,
    gate,
    moments,
    root_of_second,
    subtract_,
    update_moments_,
    update_weights_,
    write_where_,
)
from tests.stability.optimizers.given import ADAM, SPAM_

GROUP = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.5}


class Plain(torch.optim.Optimizer):
    """An optimizer with groups and a state, but no update rule."""

    def step(self, closure=None):
        raise NotImplementedError


def made(*gradients, withheld=None):
    """Returns an optimizer and its parameters, one for each gradient; a gradient may be None."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(2, 3)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.full((2, 3), gradient)
    optimizer = Plain(parameters, dict(GROUP))
    if withheld is not None:
        optimizer.found_inf = torch.tensor(float(withheld))
    return optimizer, parameters


def test_moments_start_as_zeros_on_first_use_and_are_kept():
    optimizer, (first, idle, last) = made(1.0, None, 2.0)
    (group,) = optimizer.param_groups
    known = moments(optimizer, group, "resets")
    assert [w is p for w, p in zip(known.weights, (first, last), strict=True)] == [True, True]
    assert optimizer.state[first].keys() == {"step", "resets", "exp_avg", "exp_avg_sq"}
    assert not any(tensor.any() for state in known.states for tensor in state.values())
    assert idle not in optimizer.state
    known.first[0].fill_(7.0)
    assert moments(optimizer, group).first[0][0, 0] == 7.0


def test_a_group_without_a_gradient_has_no_moments():
    optimizer, _ = made(None, None)
    assert moments(optimizer, optimizer.param_groups[0]) is None
    assert not optimizer.state


@pytest.mark.parametrize(("gradient", "cut"), [(1e30, LARGEST_GRADIENT), (-math.inf, -LARGEST_GRADIENT), (0.5, 0.5)])
def test_gradients_are_copied_and_clamped_so_that_their_square_is_finite(gradient, cut):
    optimizer, (parameter,) = made(gradient)
    known = moments(optimizer, optimizer.param_groups[0])
    assert torch.equal(known.gradients[0], torch.full((2, 3), cut))
    assert torch.isfinite(known.gradients[0].square()).all()
    known.gradients[0].zero_()
    assert torch.equal(parameter.grad, torch.full((2, 3), gradient)), "the gradient itself is unchanged"


def test_a_gradient_of_nan_stays_nan():
    optimizer, _ = made(math.nan)
    assert torch.isnan(moments(optimizer, optimizer.param_groups[0]).gradients[0]).all()


@pytest.mark.parametrize(("withheld", "is_open"), [(None, True), (0.0, True), (1.0, False)])
def test_the_gate_is_open_unless_an_update_is_withheld(withheld, is_open):
    optimizer, _ = made(1.0, withheld=withheld)
    assert bool(gate(optimizer, torch.device("cpu"))) is is_open
    assert bool(moments(optimizer, optimizer.param_groups[0]).open) is is_open


def test_an_open_gate_writes_values_and_a_closed_one_keeps_every_bit():
    before = torch.tensor([0.0, -0.0, math.inf, 1.0])
    payload = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)  # a NaN with bits of its own
    target, value = torch.cat([before, payload]), torch.tensor([math.nan, 2.0, 3.0, math.inf, 4.0])
    bits = target.view(torch.int32).clone()
    write_where_([target], [value], torch.tensor(False))
    assert torch.equal(target.view(torch.int32), bits)
    write_where_([target], [value], torch.tensor(True))
    assert torch.equal(target.view(torch.int32), value.view(torch.int32))


@pytest.mark.parametrize("shape", [(5,), (1, 1, 5, 1)])
def test_a_subtraction_behind_a_closed_gate_keeps_every_bit(shape):
    before = torch.tensor([0.0, -0.0, math.inf, 1.0, 0.0])
    before.view(torch.int32)[4] = 0x7FC12345  # a NaN with bits of its own
    before, amounts = before.view(shape), torch.tensor([math.nan, 2.0, 3.0, math.inf, 4.0]).view(shape)
    target = before.clone()
    subtract_([target, torch.ones(3)], [amounts, torch.ones(3)], torch.tensor(1.0), decay=0.1)
    assert torch.equal(target.view(torch.int32), before.view(torch.int32))
    last = torch.ones(3)
    subtract_([target, last], [amounts, torch.full((3,), 2.0)], torch.tensor(0.0), decay=0.5)
    assert last.tolist() == [-1.5] * 3
    assert not torch.equal(target.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("withheld", [0.0, 1.0])
def test_counters_count_applied_updates_only(withheld):
    optimizer, _ = made(1.0, 1.0, withheld=withheld)
    known = moments(optimizer, optimizer.param_groups[0])
    advance_(known.steps, torch.tensor([1.0, -3.0]), known)
    assert [step.item() for step in known.steps] == ([0.0, 0.0] if withheld else [1.0, -3.0])


class Operations(TorchDispatchMode):
    """Counts operations, without those that only look at a tensor in another way."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "kind",
    [StableAdamW(**ADAM), SPAM(**SPAM_), AdamW(**ADAM, cautious_decay=True)],
    ids=["stable_adamw", "spam", "cautious"],
)
def test_the_number_of_operations_does_not_grow_with_the_number_of_tensors(kind):
    found = []
    for count in (2, 40):
        model = nn.ParameterList([nn.Parameter(torch.randn(3, 2)) for _ in range(count)])
        optimizer = kind(model)
        for parameter in model:
            parameter.grad = torch.randn(3, 2)
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        with Operations() as seen:
            optimizer.step()
        found.append(seen.count)
    assert found[0] == found[1]


@pytest.mark.parametrize("withheld", [0.0, 1.0])
def test_running_means_are_written_only_through_an_open_gate(withheld):
    optimizer, (parameter,) = made(3.0, withheld=withheld)
    known = moments(optimizer, optimizer.param_groups[0])
    known.first[0].fill_(1.0)
    known.second[0].fill_(2.0)
    with torch.no_grad():
        update_moments_(known, GROUP)
    state = optimizer.state[parameter]
    first, second = (1.0, 2.0) if withheld else (0.9 * 1 + 0.1 * 3, 0.99 * 2 + 0.01 * 9)
    torch.testing.assert_close(state["exp_avg"], torch.full((2, 3), first))
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((2, 3), second))


def test_bias_correction_is_1_minus_beta_to_the_count():
    counts = torch.tensor([1.0, 2.0, 1e6])
    found = bias_correction(0.9, counts)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([0.1, 0.19, 1.0], rel=1e-12)


@pytest.mark.parametrize("withheld", [0.0, 1.0])
def test_descend_applies_the_adamw_update(withheld):
    optimizer, (parameter,) = made(0.5, withheld=withheld)
    before = parameter.detach().double().clone()
    known = moments(optimizer, optimizer.param_groups[0])
    known.first[0].fill_(0.3)
    known.second[0].fill_(0.04)
    root = root_of_second(known, torch.tensor([0.25], dtype=torch.float64))
    torch.testing.assert_close(root[0], torch.full((2, 3), 0.4))
    with torch.no_grad():
        update_weights_(optimizer, [adam_update(known, root, torch.tensor([0.02], dtype=torch.float64), GROUP)])
    expected = before if withheld else before * (1 - 0.01 * 0.5) - 0.02 * 0.3 / (0.4 + 1e-8)
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_a_weight_decays_cautiously_where_its_update_has_the_same_sign_or_is_0():
    """Products of two denormals are 0 in fp32, so the signs decide."""
    tiny = 1e-42
    weights = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, 0.0, tiny, -tiny])
    updates = torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0, 1.0, tiny, tiny])
    expected = torch.tensor([1.0, -2.0, 0.0, 0.0, 5.0, 0.0, tiny, 0.0])
    for dtype in (torch.float32, torch.float64):
        (found,) = cautious([weights.to(dtype)], [updates.to(dtype)])
        assert torch.equal(found, expected.to(dtype))
    kernel = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
    assert cautious([kernel], [kernel])[0].stride() == kernel.stride(), (
        "the kernel that subtracts reads memory in order"
    )
