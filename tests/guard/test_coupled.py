"""Guards of one process are coupled while their steps alternate."""

import gc

import pytest
import torch
from torch import nn

from stabletrain.guard.guard import Guard
from stabletrain.guard.loop_guard import COUPLED_FOR


def guards(count=2, attached=False):
    """Guards of small models, each with what takes a step: of its guard, or of its optimizer."""
    found = []
    for _ in range(count):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        make = Guard.attach if attached else Guard
        found.append((make(model, optimizer, max_incidents=0), model, optimizer))
    return found


def take_step(guard, model, optimizer, factor=1.0, attached=False):
    """Takes a step whose gradients are multiplied by `factor`; returns whether it was applied."""
    x = torch.ones(1, 2)
    if attached:
        optimizer.zero_grad()
        (factor * model(x).sum()).backward()
        optimizer.step()
    else:
        guard.step(lambda x: factor * model(x).sum(), batch=x)
    return guard.last.applied


@pytest.mark.parametrize("attached", [False, True])
def test_guards_whose_steps_alternate_apply_a_spike_with_an_alarm(attached):
    first, second = guards(attached=attached)
    for _ in range(3):
        for _ in range(2):  # a WGAN trains its critic more often
            take_step(*first, attached=attached)
        take_step(*second, attached=attached)
    for each in (first, second):
        assert take_step(*each, factor=500.0, attached=attached)
        assert [alarm.kind for alarm in each[0].alarms] == ["coupled_spike"]
        assert not take_step(*each, factor=1e5, attached=attached)
        assert not take_step(*each, factor=float("nan"), attached=attached)


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True])
def test_the_loss_of_a_coupled_guard_has_no_trend(coupled):
    """A loss that rises because the other network learns, as in a GAN."""
    first, second = guards()
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        level = 10.0 + 0.1 * float(torch.randn((), generator=generator)) + 3.0 * (step > 200)
        first[0].step(lambda x, level=level: level + 0.0 * first[1](x).sum(), batch=torch.ones(1, 2))
        if coupled:
            take_step(*second)
    assert [alarm.kind for alarm in first[0].alarms] == ([] if coupled else ["slow_loss"])


def test_a_guard_alone_and_one_trained_after_another_are_not_coupled():
    first, second = guards()
    for _ in range(5):
        take_step(*first)
    for _ in range(5):
        take_step(*second)
    for each in (first, second):
        assert not take_step(*each, factor=500.0)
        assert not each[0].alarms


def test_coupling_ends_when_the_other_guard_rests():
    first, second = guards()
    for each in (first, second, first, second):
        take_step(*each)
    for _ in range(COUPLED_FOR + 1):
        take_step(*first)
    assert not take_step(*first, factor=500.0)


def test_a_guard_that_is_gone_couples_nothing():
    first, second = guards()
    take_step(*first)
    take_step(*second)
    del second
    gc.collect()
    for _ in range(3):
        take_step(*first)
    assert not take_step(*first, factor=500.0)


def test_each_coupled_guard_of_three_sees_the_others():
    found = guards(count=3)
    for _ in range(3):
        for each in found:
            take_step(*each)
    assert all(take_step(*each, factor=500.0) for each in found)


def test_a_loaded_state_is_not_coupled_by_steps_from_before():
    first, second = guards()
    for _ in range(4):
        take_step(*first)
        take_step(*second)
    first[0].load_state_dict(guards(count=1)[0][0].state_dict())
    del second
    gc.collect()
    for _ in range(5):
        take_step(*first)
    assert not take_step(*first, factor=500.0)
