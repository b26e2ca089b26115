"""What was wrong with weights, buffers and moments before a step, and how far they have come, in closed forms."""

import math

import pytest
import torch
from torch import nn

from stabletrain.forensics.probes.state import BEYOND, BORNE, damaged, drift, overlong, staleness


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
    """AdamW with these moments of the weight."""
    optimizer = torch.optim.AdamW([model.weight], betas=betas, eps=1e-12)
    moments = {"exp_avg": torch.full((1000,), first), "exp_avg_sq": torch.full((1000,), second)}
    optimizer.state[model.weight] = {"step": torch.tensor(steps), **moments}
    return optimizer


def older(model, optimizer=None, step=0):
    """A captured state of before, as far as it is looked at."""
    state = {} if optimizer is None else {"weight": {k: v.clone() for k, v in optimizer.state[model.weight].items()}}
    return {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": {"state": state}, "step": step}


def found(model, optimizer=None, before=None):
    """Of each damage what it is of, whether few elements are bad, and whether they are merely large."""
    return [(d.what, d.name, d.few, d.large) for d in damaged(model, [*model.buffers()], optimizer, before)]


def test_a_sound_state_has_no_damage(model):
    optimizer = adam(model)
    assert found(model, optimizer, older(model, optimizer)) == []


def test_what_is_not_finite_is_found_in_weights_buffers_and_moments(model):
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
    """The next step's forward pass has written into the live ones already."""
    (held,) = [buffer.clone() for buffer in model.buffers()]
    model.mean[0] = math.nan
    assert damaged(model, [held], None, None) == []


def test_a_mean_of_squares_below_0_is_damage_and_a_mean_of_gradients_is_none(model):
    optimizer = adam(model, first=-0.1)
    optimizer.state[model.weight]["exp_avg_sq"][3] = -1e-9
    (only,) = damaged(model, [*model.buffers()], optimizer, None)
    assert (only.what, only.words) == ("exp_avg_sq", "1 of 1000 values are negative, and they are means of squares")


@pytest.mark.parametrize(("count", "times", "is_damage"), [(10, 1.01, True), (11, 1.01, False), (10, 0.99, False)])
def test_a_few_elements_far_beyond_all_of_before_are_damage_and_many_are_not(model, count, times, is_damage):
    """An update moves them all: no update makes a hundredth of a tensor a thousand times as large."""
    before = older(model)
    with torch.no_grad():
        model.weight[:count] = -times * BEYOND * 0.5
    assert found(model, None, before) == ([("parameter", "weight", True, True)] if is_damage else [])


def test_the_words_say_how_large_it_is_and_was(model):
    before = older(model)
    with torch.no_grad():
        model.weight[0] = 1e30
    (only,) = damaged(model, [*model.buffers()], None, before)
    assert only.words == "1 of 1000 values are up to 1e+30; before, 0.5"


@pytest.mark.parametrize(("times", "is_damage"), [(1.1, True), (0.9, False)])
def test_a_large_mean_of_gradients_is_right_where_that_of_their_squares_bears_it_out(model, times, is_damage):
    optimizer = adam(model, first=1e-6, second=1e-4)
    before = older(model, optimizer)
    optimizer.state[model.weight]["exp_avg"][0] = times * BORNE * 0.01
    assert found(model, optimizer, before) == ([("exp_avg", "weight", True, True)] if is_damage else [])


def test_drift_is_the_way_that_a_typical_parameter_has_come():
    model = nn.ParameterDict({name: nn.Parameter(torch.full((4,), 2.0)) for name in "abc"})
    model["frozen"] = nn.Parameter(torch.ones(1), requires_grad=False)
    model["new"] = nn.Parameter(torch.ones(1))
    then = {"model": {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "new"}, "step": 10}
    with torch.no_grad():
        model["a"] += 4.0
        model["b"] += 1.0
        model["frozen"] += 100.0
    moved = drift(model, None, then, step=15)
    assert (moved.steps, moved.moved, moved.share, moved.grown) == (5, 1.0, 1.0 / 2 / 5, 1.5), "that of b, the median"
    assert not moved.adaptive
    assert drift(model, None, then, step=10).steps == 1, "never none"


def test_drift_is_adaptive_where_there_are_second_moments(model):
    assert drift(model, adam(model), older(model), 3).adaptive
    assert not drift(model, torch.optim.SGD([model.weight]), older(model), 3).adaptive


def test_of_weights_that_were_0_there_is_no_drift(model):
    with torch.no_grad():
        model.weight.zero_()
    assert drift(model, None, older(model), 3) is None


def test_staleness_is_near_1_while_the_second_moment_follows_and_grows_with_the_gradient(model):
    """v = g^2 (1 - beta2^t) once corrected is g^2."""
    second = 0.3**2 * (1 - 0.99**3)
    optimizer = adam(model, second=second)
    for times in (1.0, 50.0):
        gradients = [torch.full((1000,), times * 0.3), None]
        assert staleness(model, gradients, optimizer) == pytest.approx(times, rel=1e-5)
    assert math.isnan(staleness(model, [None, None], optimizer))
    assert math.isnan(staleness(model, gradients, torch.optim.SGD([model.weight])))


def test_updates_are_one_rate_long_while_both_moments_are_of_one_age(model):
    first, second = 0.3 * (1 - 0.9**3), 0.3**2 * (1 - 0.99**3)
    assert overlong(adam(model, first=first, second=second)) == pytest.approx(1.0, rel=1e-5)
    assert overlong(adam(model, first=first, second=second / 25)) == pytest.approx(5.0, rel=1e-5)
    assert math.isnan(overlong(adam(model, steps=0.0)))
    assert math.isnan(overlong(torch.optim.SGD([model.weight])))
