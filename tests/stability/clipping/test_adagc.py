"""AdaGC against its rule in float64, tensor by tensor, over sequences of gradients."""

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.monitors.gradients import measure
from stabletrain.stability.clipping import AdaGC
from tests.stability.clipping.given import CLOSED, OPEN, clip, equal_trees, flat, give, grads, one_step, small

NORMS = [1.0, 3.0, 0.8, 0.5, 0.9, 0.6, 5.0, 0.7, 1.2, 0.1, 0.6, 40.0, 0.5]


class Reference:
    """The rule in Python floats, by tensor."""

    def __init__(self, max_norm, growth, beta, warmup_steps):
        self.max_norm, self.growth, self.beta, self.warmup_steps = max_norm, growth, beta, warmup_steps
        self.step, self.gamma = 0, {}

    def __call__(self, gradients):
        """Each tensor's factor; moves the gammas."""
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
    kind, rule = AdaGC(0.7, 1.05, 0.9, warmup_steps), Reference(0.7, 1.05, 0.9, warmup_steps)
    model, shares = small(), set()
    for number, norm in enumerate(NORMS):
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
    """With gamma = 0 the tensor would be clipped to 0, and its gamma would stay 0, for ever."""
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


def test_a_closed_gate_changes_no_bit_of_the_statistics_and_does_not_count():
    kind, model = AdaGC(5.0, 1.05, 0.9, 2), small()
    one_step(kind, model, 1.0)
    for number in range(5):
        before = kind.state_dict()
        one_step(kind, model, 0.1 + 3.0 * number, number, gate=CLOSED)
        assert equal_trees(kind.state_dict(), before)
        one_step(kind, model, 1.0, number, gate=OPEN)
        assert not equal_trees(kind.state_dict(), before)
        assert kind.state_dict()["seen"] == number + 2


@pytest.mark.parametrize(("key", "value"), [("max_norm", 0.0), ("growth", 1.0), ("beta", 1.0), ("warmup_steps", 0)])
def test_bounds(key, value):
    with pytest.raises(ConfigError, match=rf"clipping\.{key}={value}.*customary"):
        AdaGC(**{key: value})
