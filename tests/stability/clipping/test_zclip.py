"""ZClip against its rule in float64, over sequences of norms with spikes."""

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.stability.clipping import ZClip
from tests.stability.clipping.given import CLOSED, equal_trees, flat, give, one_step, small

NORMS = [1.0, 1.3, 0.8, 9.0, 1.1, 0.9, 1.2, 1.0, 4.0, 1.05, 0.95, 30.0, 31.0, 1.0, 0.7, 1.4, 2.0, 1.0]


class Reference:
    """The rule in Python floats: a list while it warms up, then moving averages."""

    def __init__(self, max_norm, z_threshold, alpha, warmup_steps):
        self.max_norm, self.z_threshold, self.alpha, self.warmup_steps = max_norm, z_threshold, alpha, warmup_steps
        self.first = []
        self.mean = self.var = None

    def __call__(self, norm):
        """The norm after clipping."""
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
    kind, rule = ZClip(max_norm, 2.5, 0.9, warmup_steps), Reference(max_norm, 2.5, 0.9, warmup_steps)
    model, cut = small(), 0
    for number, norm in enumerate(NORMS):
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
    assert 1 < cut < len(NORMS), "the sequence must reach both branches"


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


def test_a_closed_gate_changes_no_bit_of_the_statistics_and_does_not_count():
    kind, model = ZClip(5.0, 2.5, 0.97, 3), small()
    for number in range(6):
        before = kind.state_dict()
        one_step(kind, model, 3.0 + number, number, gate=CLOSED)
        assert number == 0 or equal_trees(kind.state_dict(), before)
        one_step(kind, model, 1.0 + 0.1 * number, number)
        assert kind.state_dict()["seen"] == number + 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_norm", 0.0), ("z_threshold", 0.0), ("alpha", 1.0), ("alpha", 0.0), ("warmup_steps", 1)],
)
def test_bounds(key, value):
    with pytest.raises(ConfigError, match=rf"clipping\.{key}={value}.*customary"):
        ZClip(**{key: value})
