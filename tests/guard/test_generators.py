"""The states of the generators are those that PyTorch, NumPy and Python give, whatever was drawn in between."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stabletrain.guard.generators import GeneratorStates
from stabletrain.machine.determinism import Generators

CPU = torch.device("cpu")

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "a uniform of NumPy": lambda: np.random.rand(),
    "a normal of NumPy, which caches a second": lambda: np.random.normal(),
    "both normals of NumPy": lambda: np.random.normal(size=2),
    "a permutation of NumPy": lambda: np.random.permutation(5),
    "the words of NumPy once around": lambda: np.random.randint(0, 2**32, size=624, dtype=np.uint64),
    "another seed of NumPy": lambda: np.random.seed(7),
    "an older state of NumPy": lambda: np.random.set_state(OLDER),
    "a number of Python": lambda: random.random(),
    "a number of PyTorch": lambda: torch.rand(()),
}
OLDER = np.random.RandomState(3).get_state()


def as_text(found: Generators) -> str:
    with np.printoptions(threshold=10**6):
        return repr((found.cpu.tolist(), found.card, found.numpy, found.python, found.device))


@pytest.mark.parametrize("first", DRAWS)
def test_states_are_those_of_the_generators(first):
    states = GeneratorStates(CPU)
    for second in DRAWS.values():
        for draw in (DRAWS[first], second, second):
            draw()
            assert as_text(states.now()) == as_text(Generators.now(CPU))


def test_numpy_may_have_another_kind_of_generator():
    states, own = GeneratorStates(CPU), np.random.get_bit_generator()
    np.random.seed(0)
    states.now()
    try:
        for other in (np.random.MT19937(1), np.random.MT19937(2)):
            np.random.set_bit_generator(other)
            assert as_text(states.now()) == as_text(Generators.now(CPU))
    finally:
        np.random.set_bit_generator(own)
    assert as_text(states.now()) == as_text(Generators.now(CPU))


def test_numpy_is_asked_only_after_a_draw(monkeypatch):
    np.random.seed(0)
    states = GeneratorStates(CPU)
    states.now()
    monkeypatch.setattr(np.random, "get_state", lambda: pytest.fail("NumPy was asked for its state"))
    states.now()
