"""Activations of known layers, and hooks that leave."""

import math

import pytest
import torch
from torch import nn

from stabletrain.monitors.forward import headroom, recording_activations


class Scale(nn.Module):
    """`x * factor`, through a layer inside that gives ten times that."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.inside = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.inside.weight.copy_(10 * factor * torch.eye(2))

    def forward(self, x):
        return {"loss": None, "x": self.inside(x) / 10}


class Chain(nn.Module):
    def __init__(self, *factors):
        super().__init__()
        self.blocks = nn.ModuleList(Scale(factor) for factor in factors)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)["x"]
        return x


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_sizes_of_known_layers():
    model = Chain(2.0, 0.5, 3.0)
    with recording_activations(dict(model.blocks.named_children())) as heard:
        model(torch.tensor([[3.0, -4.0]]))
    rms = math.sqrt(12.5)
    assert {k: v.item() for k, v in heard.rms.items()} == pytest.approx({"0": 2 * rms, "1": rms, "2": 3 * rms})
    assert {k: v.item() for k, v in heard.absmax.items()} == pytest.approx({"0": 80.0, "1": 40.0, "2": 120.0})


def test_half_precision_is_measured_in_fp32():
    layer = nn.Identity()
    with recording_activations({"0": layer}) as heard:
        layer(torch.full((4, 1000), 60000.0, dtype=torch.float16))
    assert heard.rms["0"].item() == pytest.approx(60000, rel=1e-3)
    assert heard.rms["0"].dtype == torch.float32


def test_nothing_that_is_not_finite_is_hidden():
    layer = nn.Identity()
    for bad in (math.nan, math.inf):
        with recording_activations({"0": layer}) as heard:
            layer(torch.tensor([1.0, bad, 2.0]))
        assert not math.isfinite(heard.absmax["0"].item())
        assert not math.isfinite(heard.rms["0"].item())


def test_integers_and_empty_tensors_have_no_size():
    layer = nn.Identity()
    with recording_activations({"0": layer}) as heard:
        layer(torch.arange(3))
        layer((torch.zeros(0), None))
    assert heard == ({}, {})


def test_hooks_leave_even_when_the_pass_fails():
    model = Chain(1.0)
    with recording_activations(dict(model.named_children())):
        assert hooks(model) == 3
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 3))
    with pytest.raises(RuntimeError), recording_activations(dict(model.named_children())):
        model(torch.zeros(1, 3))
    assert hooks(model) == 0


def test_headroom():
    assert headroom(65504.0) == 0.0
    assert headroom(65504.0 / 8) == 3.0
    assert headroom(65504.0 * 4) == -2.0
    assert (headroom(0.0), headroom(math.inf)) == (math.inf, -math.inf)
    assert math.isnan(headroom(math.nan))
