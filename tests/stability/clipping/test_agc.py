"""AGC unit by unit, against the paper's rule in float64."""

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.stability.clipping import AGC
from tests.stability.clipping.given import clip, flat, give, grads, small

UNITS = {
    "embedding.weight": 7,
    "conv.weight": 3,
    "conv.bias": 1,
    "norm.weight": 1,
    "norm.bias": 1,
    "gain": 1,
}
"""How many units each parameter has; the classifier's are none."""


def paper(gradient, weight, units, clipping, eps):
    """The rule, one unit at a time."""
    rows, weights = gradient.reshape(units, -1).clone(), weight.reshape(units, -1)
    cut = 0
    for i in range(units):
        bound = clipping * max(weights[i].norm().item(), eps)
        if rows[i].norm().item() > bound:
            rows[i] *= bound / rows[i].norm()
            cut += 1
    return rows.reshape(gradient.shape), cut


@pytest.mark.parametrize(("clipping", "norm"), [(0.01, 1.0), (0.1, 1.0), (0.3, 3.0)])
def test_every_unit_is_cut_to_its_share_of_its_weights(clipping, norm):
    model = small()
    give(model, norm)
    for p in model.parameters():  # units of very different lengths
        if p.ndim > 1:
            p.grad *= torch.logspace(-3, 1, len(p)).view(-1, *[1] * (p.ndim - 1))
    before = grads(model)
    clipped = clip(AGC(clipping, 1e-3), model)
    cut = 0
    for name, p in model.named_parameters():
        if name.startswith("head"):
            continue
        wanted, here = paper(before[name], p.detach().double(), UNITS[name], clipping, 1e-3)
        cut += here
        torch.testing.assert_close(grads(model)[name], wanted, rtol=1e-5, atol=1e-9, msg=name)
    assert 0 < cut < sum(UNITS.values())
    assert clipped.active.item() == pytest.approx(cut / sum(UNITS.values()))
    length = torch.cat([g.flatten() for g in before.values()]).norm()
    assert clipped.coef.item() == pytest.approx((flat(model).norm() / length).item(), rel=1e-5)


def test_where_no_unit_is_cut_the_coefficient_is_exactly_one():
    """Summed by units or by tensors, a norm differs in its last bits."""
    model = small()
    for seed in range(20):
        give(model, 1e-5, seed)
        assert clip(AGC(), model).coef == 1


def test_the_classifier_is_left_bit_for_bit_its_bias_too():
    model = small()
    give(model, 1e4)
    before = grads(model)
    clip(AGC(), model)
    after = grads(model)
    assert torch.equal(after["head.weight"], before["head.weight"])
    assert torch.equal(after["head.bias"], before["head.bias"])
    assert not torch.equal(after["conv.weight"], before["conv.weight"])


def test_the_classifier_is_the_one_the_model_names():
    model = small()
    model.classifier = lambda: model.embedding  # a tied head
    give(model, 1e4)
    before = grads(model)
    clip(AGC(), model)
    assert torch.equal(grads(model)["embedding.weight"], before["embedding.weight"])
    assert not torch.equal(grads(model)["head.weight"], before["head.weight"])


def test_a_gain_in_the_shape_of_a_kernel_is_one_vector():
    model = nn.Module()
    model.gain = nn.Parameter(torch.full((6, 1, 1, 1), 2.0))
    model.gain.grad = torch.arange(6.0).view(6, 1, 1, 1)
    before = flat(model)
    clip(AGC(0.1, 1e-3), model)
    bound = 0.1 * 2.0 * 6**0.5
    torch.testing.assert_close(flat(model), before * bound / before.norm(), rtol=1e-6, atol=0)


def test_weights_of_zero_may_move_by_eps_and_rows_without_gradient_stay_zero():
    model = small()
    with torch.no_grad():
        model.embedding.weight.zero_()
    give(model, 1.0)
    model.embedding.weight.grad[2] = 0
    clip(AGC(0.01, 1e-3), model)
    lengths = model.embedding.weight.grad.double().norm(dim=1)
    expected = torch.full((7,), 1e-5, dtype=torch.float64)
    expected[2] = 0
    torch.testing.assert_close(lengths, expected, rtol=1e-5, atol=0)


def test_one_poisoned_unit_leaves_every_other_unit_as_without_it():
    clean, poisoned = small(), small()
    for model in (clean, poisoned):
        give(model, 1.0)
    poisoned.embedding.weight.grad[3, 1] = float("nan")
    for model in (clean, poisoned):
        clip(AGC(), model)
    same = torch.eq(flat(clean), flat(poisoned))
    assert (~same).sum() == 4, "row 3 only"


@pytest.mark.parametrize("key", ["clipping", "eps"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_bounds_are_above_zero(key, value):
    with pytest.raises(ConfigError, match=rf"clipping\.{key}=.*is not above 0.*clipping=none"):
        AGC(**{key: value})
