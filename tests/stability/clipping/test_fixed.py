"""Clipping to a fixed bound, none, norm, value and per_module, against closed forms in float64."""

import pytest
import torch
from torch import nn

from stabletrain.monitors.tensor_norms import measure
from stabletrain.stability.clipping import NoClip, NormClip, PerModuleClip, ValueClip
from tests.runs import CONF
from tests.stability.clipping.given import KINDS, TIGHT, clip, flat, give, grads, small


def given(norm):
    model = small()
    give(model, norm)
    return model


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_no_clip_changes_nothing_and_reports_one():
    model = given(1e6)
    before = flat(model)
    clipped = clip(NoClip(), model)
    assert (clipped.coef, clipped.active) == (1, 0)
    assert torch.equal(flat(model), before)


def test_norm_cuts_a_long_gradient_to_max_norm_in_its_own_direction():
    model = given(10.0)
    before = flat(model)
    clipped = clip(NormClip(0.5), model)
    close(flat(model), before * (0.5 / (10.0 + 1e-6)))
    close(clipped.coef.double(), torch.tensor(0.05, dtype=torch.float64))
    assert clipped.active == 1


def test_norm_is_bit_for_bit_what_pytorch_does():
    ours, theirs = given(10.0), given(10.0)
    clip(NormClip(0.5), ours)
    nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert torch.equal(flat(ours), flat(theirs))


def test_value_is_bit_for_bit_what_pytorch_does_and_counts_the_values_it_cut():
    ours, theirs = given(10.0), given(10.0)
    before = flat(ours)
    clipped = clip(ValueClip(0.9), ours)
    nn.utils.clip_grad_value_(theirs.parameters(), 0.9)
    assert torch.equal(flat(ours), flat(theirs))
    close(flat(ours), before.clamp(-0.9, 0.9))
    close(clipped.active.double(), (before.abs() > 0.9).double().mean())
    close(clipped.coef.double(), before.clamp(-0.9, 0.9).norm() / before.norm())
    assert 0 < clipped.active < 1


def test_per_module_cuts_each_module_by_itself_and_leaves_the_others_bits():
    model = given(10.0)
    for name, p in model.named_parameters():
        p.grad *= 10.0 if name.startswith("embedding") else 0.01
    before = grads(model)
    clipped = clip(PerModuleClip(0.5), model)
    after = grads(model)
    close(after["embedding.weight"], before["embedding.weight"] * (0.5 / before["embedding.weight"].norm()))
    assert all(torch.equal(after[name], before[name]) for name in before if name != "embedding.weight")
    owners = 5  # the model itself (its gain), embedding, conv, norm, head
    close(clipped.active.double(), torch.tensor(1 / owners, dtype=torch.float64))
    total = torch.cat([g.flatten() for g in before.values()]).norm()
    close(clipped.coef.double(), flat(model).norm() / total)


def test_a_modules_weight_and_bias_are_one_gradient():
    model = given(10.0)
    before = grads(model)
    clip(PerModuleClip(0.5), model)
    after = grads(model)
    for names in (["gain"], ["embedding.weight"], *([f"{m}.weight", f"{m}.bias"] for m in ("conv", "norm", "head"))):
        whole = torch.cat([before[name].flatten() for name in names])
        factor = min(1.0, 0.5 / whole.norm().item())
        for name in names:
            close(after[name], before[name] * factor)


def test_a_shared_parameter_counts_with_its_first_module_and_missing_gradients_shift_nothing():
    model = small()
    model.tied = nn.Linear(4, 7)
    model.tied.weight = model.embedding.weight
    give(model, 10.0)
    model.conv.weight.grad = None
    before = grads(model)
    clip(PerModuleClip(0.5), model)
    for names in (["embedding.weight"], ["conv.bias"], ["norm.weight", "norm.bias"], ["tied.bias"]):
        whole = torch.cat([before[name].flatten() for name in names])
        for name in names:
            close(grads(model)[name], before[name] * min(1.0, 0.5 / whole.norm().item()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_gradient_is_left_bit_for_bit(kind):
    model = given(1e-5)
    before = flat(model)
    clipped = clip(KINDS[kind](), model)
    assert (clipped.coef, clipped.active) == (1, 0)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_reported_is_one_fp32_number_each_and_true(kind):
    model = given(20.0)
    clipped = clip(KINDS[kind](), model)
    assert clipped.coef.shape == clipped.active.shape == ()
    assert clipped.coef.dtype == clipped.active.dtype == torch.float32
    close(clipped.coef.double(), flat(model).norm() / 20.0)
    assert (clipped.active > 0) == (kind not in ("none", "update_norm")), "the first norm is no outlier"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_gradients_is_no_error(kind):
    clipped = clip(KINDS[kind](), nn.Linear(2, 2))
    assert (clipped.coef, clipped.active) == (1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_gradients_keep_their_dtype_and_are_cut_within_its_precision(kind):
    model = small()
    model.conv.weight.data = model.conv.weight.data.bfloat16()
    give(model, 20.0)
    clipped = clip(KINDS[kind](), model)
    assert model.conv.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(flat(model).norm() / 20.0, clipped.coef.double(), rtol=8e-3, atol=0)


def test_measure_equals_float64_per_parameter_and_over_all():
    model = given(3.0)
    norms = measure(model)
    close(norms.each.double(), torch.stack([g.norm() for g in grads(model).values()]))
    close(norms.total.double(), flat(model).norm())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_one_bad_gradient_makes_the_total_non_finite(bad):
    model = given(1.0)
    model.embedding.weight.grad[0, 0] = bad
    assert not torch.isfinite(measure(model).total)


def test_a_model_without_gradients_has_norm_zero():
    assert measure(nn.Linear(2, 2)).total == 0


def test_these_tests_cover_every_option_of_the_group():
    options = {file.stem for file in (CONF / "clipping").glob("*.yaml")}
    assert set(KINDS) == set(TIGHT) == options
