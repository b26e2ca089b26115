"""Checks corrupt weights, buffers and moments, and how far the weights have moved, against closed forms."""

import math

import pytest
import torch
from torch import nn

from stabletrain.forensics.probes.state import (
    MAX_MOMENT_RATIO,
    OUTLIER_RATIO,
    damaged,
    drift,
    last_move,
    staleness,
    update_length,
)


class Small(nn.Module):
    """A weight of 1000 elements, a frozen one, and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1000,), 0.5))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))


@pytest.fixture
def model():
    return Small()


def adam(model, steps=3.0, first=0.1, second=0.01, betas=(0.9, 0.99)):
    """AdamW with the given moments for `weight`."""
    optimizer = torch.optim.AdamW([model.weight], betas=betas, eps=1e-12)
    moments = {"exp_avg": torch.full((1000,), first), "exp_avg_sq": torch.full((1000,), second)}
    optimizer.state[model.weight] = {"step": torch.tensor(steps), **moments}
    return optimizer


def older(model, optimizer=None, step=0):
    """A captured older state with the entries that are read."""
    state = {} if optimizer is None else {"weight": {k: v.clone() for k, v in optimizer.state[model.weight].items()}}
    return {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": {"state": state}, "step": step}


def found(model, optimizer=None, before=None):
    """Returns (what, name, few, large) of each damage."""
    return [(d.what, d.name, d.few, d.large) for d in damaged(model, [*model.buffers()], optimizer, before)]


def test_a_healthy_state_has_no_damage(model):
    optimizer = adam(model)
    assert found(model, optimizer, older(model, optimizer)) == []


def test_non_finite_values_are_found_in_weights_buffers_and_moments(model):
    optimizer = adam(model)
    with torch.no_grad():
        model.weight[7] = math.nan
        model.mean[:] = math.inf
        optimizer.state[model.weight]["exp_avg"][:500] = -math.inf
    first, *rest = damaged(model, [*model.buffers()], optimizer, None)
    assert first.words == "1 of 1000 values are not finite"
    assert (first.what, first.name, first.few) == ("parameter", "weight", True)
    assert [(d.what, d.name, d.few) for d in rest] == [("buffer", "mean", False), ("exp_avg", "weight", False)]


def test_buffers_are_judged_as_they_were_before_the_step(model):
    """The live buffers may have changed since, in a later forward pass."""
    (held,) = [buffer.clone() for buffer in model.buffers()]
    model.mean[0] = math.nan
    assert damaged(model, [held], None, None) == []


def test_a_negative_mean_of_squares_is_damage_and_a_negative_mean_of_gradients_is_not(model):
    optimizer = adam(model, first=-0.1)
    optimizer.state[model.weight]["exp_avg_sq"][3] = -1e-9
    (only,) = damaged(model, [*model.buffers()], optimizer, None)
    assert only.what == "exp_avg_sq"
    assert only.words == "1 of 1000 values are negative, but a mean of squares cannot be"


@pytest.mark.parametrize(("count", "times", "is_damage"), [(10, 1.01, True), (11, 1.01, False), (10, 0.99, False)])
def test_a_few_elements_far_above_the_older_maximum_are_damage_and_many_are_not(model, count, times, is_damage):
    """An update changes all elements, so it cannot make only 1 % of them a thousand times as large."""
    before = older(model)
    with torch.no_grad():
        model.weight[:count] = -times * OUTLIER_RATIO * 0.5
    assert found(model, None, before) == ([("parameter", "weight", True, True)] if is_damage else [])


def test_the_text_gives_the_largest_value_now_and_before(model):
    before = older(model)
    with torch.no_grad():
        model.weight[0] = 1e30
    (only,) = damaged(model, [*model.buffers()], None, before)
    assert only.words == "1 of 1000 values are up to 1e+30; before, 0.5"


@pytest.mark.parametrize(("times", "is_damage"), [(1.1, True), (0.9, False)])
def test_a_large_first_moment_is_accepted_if_the_second_moment_explains_it(model, times, is_damage):
    optimizer = adam(model, first=1e-6, second=1e-4)
    before = older(model, optimizer)
    optimizer.state[model.weight]["exp_avg"][0] = times * MAX_MOMENT_RATIO * 0.01
    assert found(model, optimizer, before) == ([("exp_avg", "weight", True, True)] if is_damage else [])


def test_drift_is_how_far_the_median_parameter_has_moved():
    model = nn.ParameterDict({name: nn.Parameter(torch.full((4,), 2.0)) for name in "abc"})
    model["frozen"] = nn.Parameter(torch.ones(1), requires_grad=False)
    model["new"] = nn.Parameter(torch.ones(1))
    then = {"model": {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "new"}, "step": 10}
    with torch.no_grad():
        model["a"] += 4.0
        model["b"] += 1.0
        model["frozen"] += 100.0
    moved = drift(model, None, then, step=15)
    assert (moved.steps, moved.moved, moved.share, moved.grown) == (5, 1.0, 1.0 / 2 / 5, 1.5), "b is the median"
    assert not moved.adaptive
    assert drift(model, None, then, step=10).steps == 1, "at least one step"


def test_drift_is_adaptive_if_there_are_second_moments(model):
    assert drift(model, adam(model), older(model), 3).adaptive
    assert not drift(model, torch.optim.SGD([model.weight]), older(model), 3).adaptive


def test_there_is_no_drift_of_weights_that_were_0(model):
    with torch.no_grad():
        model.weight.zero_()
    assert drift(model, None, older(model), 3) is None


def test_staleness_is_1_if_the_second_moment_matches_and_grows_with_the_gradient(model):
    """With bias correction, v = g^2 (1 - beta2^t) gives g^2."""
    second = 0.3**2 * (1 - 0.99**3)
    optimizer = adam(model, second=second)
    for times in (1.0, 50.0):
        gradients = [torch.full((1000,), times * 0.3), None]
        assert staleness(model, gradients, optimizer) == pytest.approx(times, rel=1e-5)
    assert math.isnan(staleness(model, [None, None], optimizer))
    assert math.isnan(staleness(model, gradients, torch.optim.SGD([model.weight])))


def test_updates_are_one_learning_rate_long_if_both_moments_are_equally_old(model):
    first, second = 0.3 * (1 - 0.9**3), 0.3**2 * (1 - 0.99**3)
    assert update_length(adam(model, first=first, second=second)) == pytest.approx(1.0, rel=1e-5)
    assert update_length(adam(model, first=first, second=second / 25)) == pytest.approx(5.0, rel=1e-5)
    assert math.isnan(update_length(adam(model, steps=0.0)))
    assert math.isnan(update_length(torch.optim.SGD([model.weight])))


def test_without_an_older_state_the_last_update_tells_how_far_weights_move(model):
    optimizer = adam(model, first=0.1, second=0.01)
    rate = optimizer.param_groups[0]["lr"]
    way = last_move(optimizer)
    assert (way.steps, way.grown, way.adaptive) == (1, 1.0, True)
    assert way.moved == pytest.approx(rate * update_length(optimizer), rel=1e-5)
    sizes = sorted(float(p.detach().square().mean().sqrt()) for p in model.parameters())
    assert rate / sizes[-1] <= way.share / update_length(optimizer) <= rate / sizes[0]
    assert last_move(torch.optim.SGD(model.parameters(), lr=0.1)) is None
    assert last_move(adam(model, steps=0.0)) is None


@pytest.mark.parametrize(
    ("frozen", "value", "is_damage"), [(True, -math.inf, False), (True, math.nan, True), (False, -math.inf, True)]
)
def test_a_frozen_parameter_may_be_a_mask(model, frozen, value, is_damage):
    model.weight.requires_grad_(not frozen)
    with torch.no_grad():
        model.weight.view(-1)[0] = value
    assert bool(found(model)) == is_damage
