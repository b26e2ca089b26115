"""Gradients that are clipped while still scaled, and an optimizer that was not restored: one alarm each."""

import copy

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from stabletrain import Guard
from stabletrain.guard.loop_mistakes import SAME_NORMS, ScaledClipping
from tests.guard.given import batches, network
from tests.guard.policy.given import reading


def kinds(guard):
    return [alarm.kind for alarm in guard.alarms]


@pytest.mark.parametrize(("mistaken", "told"), [(True, ["scaled_clipping"]), (False, [])])
@pytest.mark.parametrize("bound", [1.0, 0.25])
def test_a_loop_that_clips_before_it_unscales_is_told_so_once(tmp_path, mistaken, told, bound):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    guard = Guard.attach(model, optimizer, scaler=scaler, folder=tmp_path)
    for x, y in batches(20):
        optimizer.zero_grad()
        scaler.scale(10 * torch.nn.functional.cross_entropy(model(x), y)).backward()
        if not mistaken:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), bound)
        scaler.step(optimizer)
        scaler.update()
    assert kinds(guard) == told
    assert all(f"clips the gradients to {bound:g} while they are still scaled by 6" in a.text for a in guard.alarms)


@pytest.mark.parametrize(
    ("norms", "scale", "alarms"),
    [
        ([2**-16] * 9, 2.0**16, 1),
        ([2**-16] * (SAME_NORMS - 1), 2.0**16, 0),
        ([2**-16, 2**-15] * 9, 2.0**16, 0),
        ([1.2345 * 2**-16] * 9, 2.0**16, 0),
        ([1.0] * 9, 2.0**16, 0),
        ([0.0] * 9, 2.0**16, 0),
        ([2**-16] * 4 + [0.0] + [2**-16] * 4, 2.0**16, 0),
        ([1e-3] * 9, 1.0, 0),
    ],
)
def test_only_equal_small_norms_at_a_round_multiple_of_the_scale_are_a_mistake(norms, scale, alarms):
    clipping = ScaledClipping()
    found = [
        alarm
        for step, norm in enumerate(norms, 1)
        for alarm in clipping.add(reading(1.0, norm, scale=scale, step=step))
    ]
    assert len(found) == alarms
    assert [alarm.since for alarm in found] == [1] * alarms


def trained(folder, steps, made=torch.optim.AdamW, **restored):
    """A guard after some steps, of a loop that restores what is given."""
    model = network()
    optimizer = made(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, folder=folder)
    for name, state in restored.items():
        {"model": model, "optimizer": optimizer, "guard": guard}[name].load_state_dict(state)
    for x, y in batches(steps):
        guard.step(lambda x=x, y=y: torch.nn.functional.cross_entropy(model(x), y))
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "guard": guard.state_dict()}
    return guard, copy.deepcopy(states)


@pytest.mark.parametrize(
    ("made", "left_out", "told"),
    [
        (torch.optim.AdamW, "optimizer", ["lost_moments"]),
        (torch.optim.AdamW, "", []),
        (torch.optim.AdamW, "guard", []),
        (torch.optim.SGD, "optimizer", []),
    ],
)
def test_an_optimizer_that_is_not_restored_is_told_once(tmp_path, caplog, made, left_out, told):
    _, states = trained(tmp_path / "first", 20, made)
    kept = {name: state for name, state in states.items() if name != left_out}
    guard, _ = trained(tmp_path / "second", 5, made, **kept)
    assert kinds(guard) == told
    assert ("although the guard was restored after 20 steps" in caplog.text) == bool(told)
