"""Tests for the values of a loop by name: equal ones of other types are the same, and generators are found."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from stabletrain.beside.preflight.loop import Loop
from stabletrain.beside.preflight.state import differences, flat, generators_of, same, sources_of, state_of


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 1.0),
        (0.1, torch.tensor(0.1)),
        (torch.tensor(3), torch.tensor([3.0])),
        (float("nan"), torch.tensor(float("nan"))),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])),
        (np.float64(2.0), 2),
        (np.arange(3), torch.arange(3)),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (len, max),
        (None, None),
    ],
)
def test_values_that_are_the_same(one, two):
    assert same(one, two)
    assert same(two, one)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 2),
        (1, None),
        (torch.tensor(1.0), None),
        (torch.tensor(1.0), torch.tensor(1.0 + 1e-7)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.tensor([float("nan")]), torch.tensor([0.0])),
        ("a", "b"),
    ],
)
def test_values_that_differ(one, two):
    assert not same(one, two)
    assert not same(two, one)


def test_nested_values_have_paths_and_may_contain_themselves():
    values = {"betas": (0.9, 0.95), "of": {"n": 1}}
    values["again"] = values
    assert flat(values, "a") == {"a.betas[0]": 0.9, "a.betas[1]": 0.95, "a.of.n": 1}


def test_lists_and_tuples_with_the_same_values_are_the_same():
    assert differences({"": flat({"lr": [1, 2]}, "")}, {"": flat({"lr": (1.0, 2.0)}, "")}) == {}


def small(**more):
    """Returns a loop of a model with a buffer that is not persistent."""
    model = nn.Linear(2, 1)
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Loop(model, [optimizer], **{"loss": lambda batch: model(batch).mean(), "batch": lambda step: step, **more})


def test_every_part_of_a_loop_has_its_values():
    loop = small(others={"best": 3.0})
    loop.loss(torch.ones(1, 2)).backward()
    loop.optimizers[0].step()
    state = state_of(loop)
    assert [*state["parameters"]] == ["weight", "bias"]
    assert [*state["buffers"]] == ["scratch"]
    assert "optimizers.0.state[weight].momentum_buffer" in state["optimizers.0.state"]
    assert state["optimizers.0.param_groups"]["optimizers.0.param_groups[0].lr"] == 0.1
    assert state["attributes"]["training"] is True
    assert state["best"] == {"best": 3.0}


def test_the_generators_of_a_loop_are_found_where_its_functions_refer_to_them():
    in_closure, in_loader = torch.Generator(), torch.Generator()
    loader = DataLoader([1, 2], generator=in_loader)
    held = {"of_numpy": np.random.default_rng(0)}
    python = random.Random(0)

    def step(batch):
        return torch.rand(1, generator=in_closure), next(iter(loader)), held

    found = dict(generators_of(small(step=step, others={"python": python})))
    assert found["in_closure"] is in_closure
    assert found["loader.generator"] is in_loader
    assert found["held.of_numpy"] is held["of_numpy"]
    assert found["python"] is python


def test_a_source_of_random_numbers_repeats_what_it_gave():
    of_numpy = np.random.default_rng(0)
    loop = small(others={"a": torch.Generator(), "b": random.Random(0), "c": of_numpy})
    draws = {
        "the random generator 'a'": lambda: float(torch.rand(1, generator=loop.others["a"])),
        "the random generator 'b'": loop.others["b"].random,
        "the random generator 'c'": of_numpy.random,
        "the random state of PyTorch": lambda: float(torch.rand(1)),
        "the random state of Python": random.random,
        "the random state of NumPy": np.random.rand,
    }
    sources = sources_of(loop)
    assert draws.keys() <= sources.keys()
    for name, draw in draws.items():
        before = sources[name].get()
        first = draw()
        sources[name].set(before)
        assert draw() == first
