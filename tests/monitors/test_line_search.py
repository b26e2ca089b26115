"""The search along the update: closed forms, the ends of its range, its cost, and that it leaves no trace."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stabletrain.monitors.curvature import along_update, margin
from stabletrain.monitors.forward import isolated
from stabletrain.stability.objective import CrossEntropy
from tests.monitors.watched import adamw, features

SLOPE = 0.3


class Point(nn.Module):
    """One weight, which is the output."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([0.7]))

    def forward(self, inputs):
        return self.x


def quadratic(output, batch, n_valid):
    del batch, n_valid
    return SimpleNamespace(total=(0.5 * SLOPE * output.square()).sum())


def chord(rate):
    """Where the straight line between the last two powers of two is 0: exact if 2 / (rate * SLOPE) is one of them."""
    low = 2.0 ** math.floor(math.log2(2 / (rate * SLOPE)))
    t = low * rate * SLOPE  # the loss along the update is L(w) (1 - c rate SLOPE)^2
    return low * (1 + (2 - t) / (3 * t - 2))


@pytest.mark.parametrize("rate", [0.2, 0.5, 2.0, 5.0, 8.0, 20.0])
def test_gradient_descent_on_a_quadratic(rate):
    model = Point()
    before = {"x": model.x.detach().clone()}
    with torch.no_grad():
        model.x -= rate * SLOPE * model.x
    found = margin(along_update(model, before, features(), quadratic))
    assert found == pytest.approx(chord(rate), rel=1e-3)
    assert 0.88 <= found * rate * SLOPE / 2 <= 1.001


@pytest.mark.parametrize("critical", [2.0**power for power in range(-3, 6)])
def test_a_power_of_two_is_exact(critical):
    assert margin(lambda c: c * (c - critical)) == critical


@pytest.mark.parametrize(
    ("rise", "expected"),
    [
        (lambda c: -c, 128.0),
        (lambda c: c - 65, 128.0),
        (lambda c: c, 1 / 16),
        (lambda c: c - 0.124, 1 / 16),
        (lambda c: math.nan, 1 / 16),
        (lambda c: math.nan if c > 5 else -1.0, 4.0),
        (lambda c: math.inf if c > 5 else -1.0, 4.0),
    ],
)
def test_the_ends_of_the_range_and_values_that_are_not_finite(rise, expected):
    assert margin(rise) == expected


def test_a_search_costs_at_most_four_losses():
    for critical in torch.logspace(-3, 4, 200).tolist():
        asked = []
        margin(lambda c, asked=asked, critical=critical: asked.append(c) or c - critical)
        assert 3 <= len(asked) <= 4


class Noisy(nn.Module):
    """BatchNorm and dropout, which have a state and draw numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, inputs):
        return self.layers(inputs)


def test_nothing_changes_and_every_factor_draws_the_same_masks():
    model, batch = Noisy(), features()
    optimizer = adamw(model, lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    CrossEntropy()(model(batch.inputs), batch, torch.tensor(16)).total.backward()
    optimizer.step()

    def state():
        gradients = {f"grad/{name}": p.grad.clone() for name, p in model.named_parameters()}
        return gradients | {n: t.clone() for n, t in model.state_dict().items()} | {"rng": torch.get_rng_state()}

    was = state()
    with isolated(model):
        rise = along_update(model, before, batch, CrossEntropy())
        assert [rise(0.0), rise(0.0)] == [0.0, 0.0]
        assert rise(1.0) == rise(1.0) != 0.0
        assert 1 / 16 <= margin(rise) <= 128
    now = state()
    assert all(torch.equal(now[name], value) for name, value in was.items())


def test_the_loss_is_computed_in_fp32_and_counts_the_valid_targets():
    model, batch = Noisy().eval(), features()
    batch.targets[3:] = -100
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.layers[3].bias += torch.arange(4.0)
        moved = nn.functional.cross_entropy(model(batch.inputs).double(), batch.targets)
        model.layers[3].bias -= torch.arange(4.0)
        still = nn.functional.cross_entropy(model(batch.inputs).double(), batch.targets)
        model.layers[3].bias += torch.arange(4.0)
    with torch.autocast("cpu", torch.bfloat16):
        rise = along_update(model, before, batch, CrossEntropy())(1.0)
    assert rise == pytest.approx((moved - still).item(), rel=1e-5)
