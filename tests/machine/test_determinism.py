"""Randomness by number: the same (seed, step) draws the same, whatever was drawn before."""

import random

import numpy as np
import pytest
import torch

from stabletrain.machine.determinism import Off, Seeded, Strict, mix


def draw():
    return torch.rand(4).tolist(), np.random.rand(4).tolist(), [random.random() for _ in range(4)]


def test_a_seeded_step_draws_the_same_whatever_went_before():
    seeded = Seeded()
    seeded.seed_step(3, 17)
    first = draw()
    draw()
    seeded.seed_step(3, 17)
    assert draw() == first


def test_seeds_and_steps_all_draw_differently():
    seen = set()
    for seed in range(20):
        for step in range(50):
            Seeded().seed_step(seed, step)
            seen.add(torch.rand(()).item())
    assert len(seen) > 990
    assert len({mix(seed, step) for seed in range(100) for step in range(100)}) == 10_000


def test_off_leaves_the_generator_where_it_is():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    Off().seed_run(1)
    Off().seed_step(1, 2)
    assert torch.equal(torch.rand(2), expected)


def test_strict_refuses_what_has_no_deterministic_form_and_seeded_lifts_that_again():
    switches = Strict().prepare()
    assert switches["use_deterministic_algorithms"]
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
    Seeded().prepare()
    assert not torch.are_deterministic_algorithms_enabled()
