"""AGC unit by unit, AdaGC tensor by tensor and ZClip over sequences of norms, each against its rule in float64."""

import pytest
import torch
from torch import nn

from stabletrain.monitors.tensor_norms import measure
from stabletrain.stability.clipping import AGC, AdaGC, ZClip
from tests.stability.clipping.given import CLOSED, OPEN, clip, equal_trees, flat, give, grads, one_step, small

UNITS = {
    "embedding.weight": 7,
    "conv.weight": 3,
    "conv.bias": 1,
    "norm.weight": 1,
    "norm.bias": 1,
    "gain": 1,
}
"""How many units each parameter has; the classifier's are none."""


def agc_rule(gradient, weight, units, clipping, eps):
    """Applies AGC's rule, one unit at a time."""
    rows, weights = gradient.reshape(units, -1).clone(), weight.reshape(units, -1)
    cut = 0
    for i in range(units):
        bound = clipping * max(weights[i].norm().item(), eps)
        if rows[i].norm().item() > bound:
            rows[i] *= bound / rows[i].norm()
            cut += 1
    return rows.reshape(gradient.shape), cut


@pytest.mark.parametrize(("clipping", "norm"), [(0.01, 1.0), (0.1, 1.0), (0.3, 3.0)])
def test_every_unit_is_clipped_to_a_fraction_of_its_weight_norm(clipping, norm):
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
        wanted, here = agc_rule(before[name], p.detach().double(), UNITS[name], clipping, 1e-3)
        cut += here
        torch.testing.assert_close(grads(model)[name], wanted, rtol=1e-5, atol=1e-9, msg=name)
    assert 0 < cut < sum(UNITS.values())
    assert clipped.active.item() == pytest.approx(cut / sum(UNITS.values()))
    length = torch.cat([g.flatten() for g in before.values()]).norm()
    assert clipped.coef.item() == pytest.approx((flat(model).norm() / length).item(), rel=1e-5)


def test_where_no_unit_is_cut_the_coefficient_is_exactly_one():
    """A norm summed by units differs in its last bits from one summed by tensors."""
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


def test_one_non_finite_unit_does_not_change_the_other_units():
    clean, poisoned = small(), small()
    for model in (clean, poisoned):
        give(model, 1.0)
    poisoned.embedding.weight.grad[3, 1] = float("nan")
    for model in (clean, poisoned):
        clip(AGC(), model)
    same = torch.eq(flat(clean), flat(poisoned))
    assert (~same).sum() == 4, "row 3 only"


ADAGC_NORMS = [1.0, 3.0, 0.8, 0.5, 0.9, 0.6, 5.0, 0.7, 1.2, 0.1, 0.6, 40.0, 0.5]


class AdaGCRule:
    """AdaGC's rule in Python floats, by tensor."""

    def __init__(self, max_norm, growth, beta, warmup_steps):
        self.max_norm, self.growth, self.beta, self.warmup_steps = max_norm, growth, beta, warmup_steps
        self.step, self.gamma = 0, {}

    def __call__(self, gradients):
        """Returns each tensor's factor and updates the gammas."""
        total = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
        factors = {}
        for name, gradient in gradients.items():
            norm = gradient.norm().item()
            if self.step < self.warmup_steps:
                factors[name] = min(self.max_norm / total, 1.0)
                self.gamma[name] = min(self.gamma.get(name, float("inf")), factors[name] * norm)
            else:
                factors[name] = min(self.growth * self.gamma[name] / norm, 1.0)
                self.gamma[name] = self.beta * self.gamma[name] + (1 - self.beta) * factors[name] * norm
        self.step += 1
        return factors


@pytest.mark.parametrize("warmup_steps", [1, 5])
def test_a_sequence_of_gradients_is_clipped_as_the_rule_says(warmup_steps):
    kind, rule = AdaGC(0.7, 1.05, 0.9, warmup_steps), AdaGCRule(0.7, 1.05, 0.9, warmup_steps)
    model, shares = small(), set()
    for number, norm in enumerate(ADAGC_NORMS):
        give(model, norm, seed=number)
        before = grads(model)
        factors = rule(before)
        clipped = clip(kind, model)
        for name, gradient in grads(model).items():
            torch.testing.assert_close(gradient, before[name] * factors[name], rtol=1e-4, atol=0, msg=name)
        share = sum(factor < 1 for factor in factors.values()) / len(factors)
        assert clipped.active.item() == pytest.approx(share)
        assert clipped.coef.item() == pytest.approx(flat(model).norm().item() / norm, rel=1e-4)
        shares.add(share)
        state = kind.state_dict()
        gamma = dict(zip(state["names"], state["gamma"].tolist(), strict=True))
        assert gamma == pytest.approx(rule.gamma, rel=1e-4)
    assert len(shares) > 2, "some steps must clip only some tensors"


def test_one_tensors_burst_leaves_the_others_bits():
    kind, model = AdaGC(1e6, 1.05, 0.98, 2), small()
    for _ in range(4):
        one_step(kind, model, 1.0, seed=0)
    give(model, 1.0, seed=0)
    model.embedding.weight.grad *= 1e3
    before = grads(model)
    clip(kind, model)
    after = grads(model)
    assert after["embedding.weight"].norm() < 1.1 * before["embedding.weight"].norm() / 1e3
    assert all(torch.equal(after[name], before[name]) for name in before if name != "embedding.weight")


def test_statistics_follow_the_name_when_the_model_is_reordered():
    class Pair(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            setattr(self, first, nn.Linear(3, 3, bias=False))
            setattr(self, second, nn.Linear(3, 3, bias=False))

    def given(model):
        model.big.weight.grad, model.small.weight.grad = torch.full((3, 3), 10.0), torch.full((3, 3), 0.1)
        return model

    kind, other = AdaGC(1e6, 1.05, 0.98, 1), AdaGC(1e6, 1.05, 0.98, 1)
    clip(kind, given(Pair("big", "small")))
    other.load_state_dict(kind.state_dict())
    turned = given(Pair("small", "big"))
    assert clip(other, turned).coef == 1, "each was compared with its own norm"
    assert torch.equal(turned.big.weight.grad, torch.full((3, 3), 10.0))


def test_a_tensor_without_a_gradient_keeps_its_gamma_and_a_new_one_starts_with_its_first_norm():
    kind, model = AdaGC(5.0, 1.05, 0.9, 2), small()

    def gamma():
        state = kind.state_dict()
        return dict(zip(state["names"], state["gamma"].tolist(), strict=True))

    for number in range(3):
        give(model, 1.0, number)
        model.gain.grad = None
        clip(kind, model)
    kept = gamma()
    assert "gain" not in kept
    give(model, 20.0, 3)
    model.conv.weight.grad = None
    model.gain.grad = torch.tensor(3.0)
    total = measure(model).total.item()
    clip(kind, model)
    assert gamma()["conv.weight"] == kept["conv.weight"]
    assert gamma()["norm.weight"] > kept["norm.weight"]
    assert gamma()["gain"] == pytest.approx(3.0 * 5.0 / total, rel=1e-5), "clipped with the whole gradient"
    model.gain.grad = torch.tensor(100.0)
    clip(kind, model)
    assert model.gain.grad.item() == pytest.approx(1.05 * 3.0 * 5.0 / total, rel=1e-5)


def test_a_gradient_of_zero_never_becomes_the_bound():
    """With gamma = 0 the tensor would be clipped to 0, and its gamma would stay 0 forever."""
    kind, model = AdaGC(5.0, 1.05, 0.9, 2), small()
    for number in range(4):
        give(model, 1.0, number)
        if number < 3:
            model.gain.grad.zero_()
        clip(kind, model)
    assert model.gain.grad != 0
    give(model, 1.0, 4)
    model.gain.grad.zero_()
    before = kind.state_dict()
    clip(kind, model)
    after = kind.state_dict()
    place = after["names"].index("gain")
    assert after["gamma"][place] == before["gamma"][place] > 0


def test_a_closed_gate_changes_no_bit_of_the_statistics_of_adagc_and_does_not_count():
    kind, model = AdaGC(5.0, 1.05, 0.9, 2), small()
    one_step(kind, model, 1.0)
    for number in range(5):
        before = kind.state_dict()
        one_step(kind, model, 0.1 + 3.0 * number, number, gate=CLOSED)
        assert equal_trees(kind.state_dict(), before)
        one_step(kind, model, 1.0, number, gate=OPEN)
        assert not equal_trees(kind.state_dict(), before)
        assert kind.state_dict()["seen"] == number + 2


ZCLIP_NORMS = [1.0, 1.3, 0.8, 9.0, 1.1, 0.9, 1.2, 1.0, 4.0, 1.05, 0.95, 30.0, 31.0, 1.0, 0.7, 1.4, 2.0, 1.0]


class ZClipRule:
    """ZClip's rule in Python floats: a list during the warm-up, then moving averages."""

    def __init__(self, max_norm, z_threshold, alpha, warmup_steps):
        self.max_norm, self.z_threshold, self.alpha, self.warmup_steps = max_norm, z_threshold, alpha, warmup_steps
        self.first = []
        self.mean = self.var = None

    def __call__(self, norm):
        """Returns the norm after clipping."""
        if self.mean is None:
            norm = min(norm, self.max_norm)
            self.first.append(norm)
            if len(self.first) == self.warmup_steps:
                self.mean = sum(self.first) / len(self.first)
                self.var = sum((x - self.mean) ** 2 for x in self.first) / len(self.first)
            return norm
        std = self.var**0.5
        z = (norm - self.mean) / (std + 1e-6)
        if z > self.z_threshold:
            norm = self.mean + self.z_threshold * std * self.z_threshold / z
        norm = min(norm, self.max_norm)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * norm
        self.var = self.alpha * self.var + (1 - self.alpha) * (norm - self.mean) ** 2
        return norm


@pytest.mark.parametrize("max_norm", [1.2, 5.0, 1e6])
@pytest.mark.parametrize("warmup_steps", [2, 5])
def test_a_sequence_of_norms_is_clipped_as_the_rule_says(max_norm, warmup_steps):
    kind, rule = ZClip(max_norm, 2.5, 0.9, warmup_steps), ZClipRule(max_norm, 2.5, 0.9, warmup_steps)
    model, cut = small(), 0
    for number, norm in enumerate(ZCLIP_NORMS):
        give(model, norm, seed=number)
        before = flat(model)
        clipped = one_step(kind, model, norm, seed=number)
        wanted = rule(norm)
        torch.testing.assert_close(flat(model), before * (wanted / norm), rtol=2e-5, atol=0)
        assert clipped.coef.item() == pytest.approx(wanted / norm, rel=2e-5)
        assert clipped.active == (wanted < norm)
        cut += wanted < norm
        if rule.mean is not None:
            state = kind.state_dict()
            assert state["mean"].item() == pytest.approx(rule.mean, rel=1e-5)
            assert state["var"].item() == pytest.approx(rule.var, rel=1e-3, abs=1e-10)
    assert 1 < cut < len(ZCLIP_NORMS), "the sequence must reach both branches"


def test_the_further_out_the_nearer_to_the_mean():
    model, left = small(), []
    for spike in (5.0, 50.0, 5e4):
        kind = ZClip(1e6, 2.5, 0.97, 5)
        for number, norm in enumerate([1.0, 1.3, 0.8, 1.1, 0.8]):
            one_step(kind, model, norm, number)
        one_step(kind, model, spike)
        left.append(flat(model).norm().item())
    assert left[0] > left[1] > left[2] >= 1.0
    assert left[2] == pytest.approx(1.0, rel=1e-4), "the mean of the five"


def test_norms_that_never_vary_are_not_cut():
    kind, model = ZClip(10.0, 2.5, 0.97, 3), small()
    assert all(one_step(kind, model, 2.0, seed).coef == 1 for seed in range(8))


def test_a_spike_in_the_warm_up_enters_no_higher_than_max_norm():
    kind, model = ZClip(2.0, 2.5, 0.97, 3), small()
    for number, norm in enumerate([1.0, 1e6, 1.0]):
        one_step(kind, model, norm, number)
    assert kind.state_dict()["mean"].item() == pytest.approx(4 / 3, rel=1e-5)


def test_a_closed_gate_changes_no_bit_of_the_statistics_of_zclip_and_does_not_count():
    kind, model = ZClip(5.0, 2.5, 0.97, 3), small()
    for number in range(6):
        before = kind.state_dict()
        one_step(kind, model, 3.0 + number, number, gate=CLOSED)
        assert number == 0 or equal_trees(kind.state_dict(), before)
        one_step(kind, model, 1.0 + 0.1 * number, number)
        assert kind.state_dict()["seen"] == number + 1
