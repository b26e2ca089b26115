"""Optimizers: the parameter groups, the bounds, and updates that equal PyTorch's own."""

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.stability.optimizers import SGD, AdamW, decayed


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.head = nn.Linear(4, 5)
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def names(model, parameters):
    by_id = {id(p): name for name, p in model.named_parameters()}
    return {by_id[id(p)] for p in parameters}


def test_only_matrices_and_kernels_are_decayed():
    model = Small()
    with_decay, without = decayed(model, 0.1)
    assert names(model, with_decay["params"]) == {"conv.weight", "head.weight"}
    assert names(model, without["params"]) == {
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "conv.bias",
        "head.bias",
    }
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.1, 0.0)


def test_a_head_tied_to_the_embedding_counts_as_embedding():
    model = Small()
    model.head = nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    with_decay, _ = decayed(model, 0.1)
    assert names(model, with_decay["params"]) == {"conv.weight"}


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_equals_the_formula_in_float64(fused):
    model = nn.Linear(3, 2, bias=False)
    start = model.weight.detach().double().clone()
    optimizer = AdamW(lr=0.01, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, fused=fused)(model)
    m = v = torch.zeros_like(start)
    expected = start
    for step in range(1, 4):
        gradient = torch.full((2, 3), 0.3 * step)
        model.weight.grad = gradient.clone()
        optimizer.step()
        g = gradient.double()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        expected = expected * (1 - 0.01 * 0.1)
        expected = expected - 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    torch.testing.assert_close(model.weight.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_sgd_equals_the_formula_in_float64(fused):
    model = nn.Linear(3, 2, bias=False)
    expected = model.weight.detach().double().clone()
    optimizer = SGD(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.01, fused=fused)(model)
    velocity = torch.zeros_like(expected)
    for step in range(1, 4):
        model.weight.grad = torch.full((2, 3), 0.3 * step)
        optimizer.step()
        velocity = 0.9 * velocity + (0.3 * step + 0.01 * expected)
        expected = expected - 0.1 * velocity
    torch.testing.assert_close(model.weight.double(), expected, rtol=1e-6, atol=1e-7)


ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SGD_ = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (AdamW, ADAMW | {"lr": 0.0}, r"optimizer\.lr=0\.0"),
        (AdamW, ADAMW | {"lr": float("nan")}, r"optimizer\.lr=nan"),
        (AdamW, ADAMW | {"betas": [0.9, 1.0]}, r"optimizer\.betas="),
        (AdamW, ADAMW | {"betas": [0.9]}, r"optimizer\.betas="),
        (AdamW, ADAMW | {"eps": 0.0}, r"optimizer\.eps="),
        (AdamW, ADAMW | {"weight_decay": -1.0}, r"optimizer\.weight_decay="),
        (SGD, SGD_ | {"momentum": 1.0}, r"optimizer\.momentum="),
        (SGD, SGD_ | {"momentum": 0.0, "nesterov": True}, r"optimizer\.nesterov="),
    ],
)
def test_a_bound_passed_is_named(kind, values, message):
    with pytest.raises(ConfigError, match=message):
        kind(**values)
