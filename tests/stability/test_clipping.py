"""Clipping against the closed form, and its place after unscaling."""

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.stability.clipping import NoClip, NormClip
from stabletrain.watch.gradients import measure


def model_with_gradients(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn_like(parameter)
    return model


def flat(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


def test_a_long_gradient_is_cut_to_max_norm_in_its_own_direction():
    model = model_with_gradients(scale=10.0)
    before = flat(model)
    coef = NormClip(0.5)(model, measure(model))
    torch.testing.assert_close(flat(model).norm(), torch.tensor(0.5, dtype=torch.float64), rtol=1e-5, atol=0)
    torch.testing.assert_close(flat(model), before * coef.double(), rtol=1e-6, atol=1e-9)


def test_a_short_gradient_is_left_bit_for_bit():
    model = model_with_gradients(scale=1e-3)
    before = flat(model)
    coef = NormClip(1.0)(model, measure(model))
    assert coef == 1
    assert torch.equal(flat(model), before)


def test_no_clip_changes_nothing_and_reports_one():
    model = model_with_gradients(scale=1e6)
    before = flat(model)
    assert NoClip()(model, measure(model)) == 1
    assert torch.equal(flat(model), before)


def test_measure_equals_float64_per_parameter_and_over_all():
    model = model_with_gradients(scale=3.0)
    norms = measure(model)
    each = torch.stack([p.grad.double().norm() for p in model.parameters()])
    torch.testing.assert_close(norms.each.double(), each, rtol=1e-6, atol=0)
    torch.testing.assert_close(norms.total.double(), flat(model).norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_one_bad_gradient_makes_the_total_non_finite(bad):
    model = model_with_gradients(scale=1.0)
    next(model.parameters()).grad[0, 0] = bad
    assert not torch.isfinite(measure(model).total)


def test_a_model_without_gradients_has_norm_zero():
    assert measure(nn.Linear(2, 2)).total == 0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_max_norm_must_be_above_zero(max_norm):
    with pytest.raises(ConfigError, match=r"clipping\.max_norm=.*clipping=none"):
        NormClip(max_norm)
