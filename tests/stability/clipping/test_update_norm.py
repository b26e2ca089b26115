"""update_norm in whole steps, against a loop in float64: what it scales, counts and reports."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from stabletrain.guard.checks.recheck import Recheck
from stabletrain.records import Clipped, GradNorms
from stabletrain.stability.clipping import UpdateNormClip
from stabletrain.stability.optimizers import SPAM, AdamW, StableAdamW
from stabletrain.step import apply, train_step
from tests.stability.clipping.given import CLOSED, OPEN, equal_trees
from tests.stability.clipping.test_in_the_step import fresh_for
from tests.stability.optimizers.given import ADAM, SPAM_
from tests.test_step import PRECISIONS, batch, bits, same
from tests.workloads import build_tools

MODEL, NORMS = nn.Linear(1, 1), GradNorms(torch.ones(()), torch.ones(1))

ADAM = ADAM | {"betas": [0.0, 0.99]}  # without momentum, the first updates are not longer than later ones
TIGHT = {"z_threshold": 1e-3, "alpha": 0.1, "warmup_steps": 2}
"""Clips every update that is longer than those before it."""

KINDS = {
    "adamw": AdamW(**ADAM, shows_update=True),
    "cautious": AdamW(**ADAM, cautious_decay=True),
    "stable_adamw": StableAdamW(**ADAM),
    "spam": SPAM(**SPAM_ | ADAM | {"reset_interval": 10}),
}


def clipping(**options):
    return UpdateNormClip(**{"z_threshold": 0.5, "alpha": 0.9, "warmup_steps": 4} | options)


def reference(norms, gates, z_threshold=0.5, alpha=0.9, warmup_steps=4):
    """Returns the factor of each norm, as the module's docstring says it, and mean and variance at the end."""
    seen, mean, var, factors = [], 0.0, 0.0, []
    for norm, is_open in zip(norms, gates, strict=True):
        z, factor = (norm - mean) / (math.sqrt(var) + 1e-6), 1.0
        if len(seen) >= warmup_steps and z > z_threshold:
            factor = (mean + z_threshold**2 * math.sqrt(var) / z) / norm
        factors.append(factor if is_open else 1.0)
        if not is_open:
            continue
        seen.append(norm * factor)
        if len(seen) <= warmup_steps:
            mean = sum(seen) / len(seen)
            var = sum((each - mean) ** 2 for each in seen) / len(seen)
        else:
            mean = alpha * mean + (1 - alpha) * seen[-1]
            var = alpha * var + (1 - alpha) * (seen[-1] - mean) ** 2
    return factors, mean, var


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def flat(model):
    return torch.cat([each.detach().double().flatten() for each in model.parameters()])


def step(optimizer, kind, number, gate=OPEN, rate=1.0):
    """Takes a step with the gradients of this number, two of which are spikes; returns what is reported."""
    generator = torch.Generator().manual_seed(number)
    size = 30.0 if number in (6, 11) else 1.0
    for group in optimizer.param_groups:
        group["lr"] = ADAM["lr"] * rate
        for each in group["params"]:
            each.grad = size * torch.randn(each.shape, generator=generator)
    clipped = kind(MODEL, NORMS, gate)
    apply(optimizer, gate, clipped.scale_update)
    return clipped.coef


@pytest.mark.parametrize("name", KINDS)
def test_updates_are_scaled_as_a_loop_in_float64_says(name):
    """Beside each step, the same step without clipping gives the update; decay, learning rate and skips vary."""
    model, kind = layers(), clipping()
    optimizer = KINDS[name](model)
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    norms, gates, coefs, scaled, plain = [], [], [], [], []
    for number in range(14):
        gate, rate = CLOSED if number in (3, 8) else OPEN, 1 / (1 + number)
        twin = copy.deepcopy(model)
        other = KINDS[name](twin)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = [p.detach().double() for p in model.parameters()]
        step(other, lambda *_: Clipped(1.0), number, OPEN, rate)
        lr = ADAM["lr"] * rate
        update = []
        for old, new, p in zip(before, twin.parameters(), model.parameters(), strict=True):
            moved = (old - new.detach().double()) / lr
            decay = decays[id(p)] * old
            if name == "cautious":  # of two candidates, the one whose sign agrees with its own mask
                decay = torch.where((moved - decay) * old >= 0, decay, 0.0)
            update.append((moved - decay).flatten())
        norms.append(float(torch.cat(update).norm()))
        coefs.append(float(step(optimizer, kind, number, gate, rate)))
        gates.append(bool(gate))
        moved = torch.cat(
            [(a - b.detach().double()).flatten() for a, b in zip(before, model.parameters(), strict=True)]
        )
        unclipped = torch.cat(
            [(a - b.detach().double()).flatten() for a, b in zip(before, twin.parameters(), strict=True)]
        )
        plain.append(unclipped - (1 - coefs[-1]) * lr * torch.cat(update) if gate else torch.zeros_like(moved))
        scaled.append(moved)
    factors, mean, var = reference(norms, gates)
    assert coefs == pytest.approx(factors, rel=1e-4)
    assert min(factors) < 0.95, "the sequence must clip"
    torch.testing.assert_close(torch.stack(scaled), torch.stack(plain), rtol=1e-3, atol=2e-7)
    state = kind.state_dict()
    assert int(state["update_seen"]) == 12
    assert [float(state["update_mean"]), float(state["update_var"])] == pytest.approx([mean, var], rel=1e-3)


def test_a_learning_rate_of_0_is_no_norm():
    model, kind = layers(), clipping()
    optimizer = KINDS["adamw"](model)
    for number in range(6):
        step(optimizer, kind, number)
    before = kind.state_dict()
    weights = flat(model)
    assert step(optimizer, kind, 6, rate=0.0) == 1
    assert equal_trees(kind.state_dict(), before)
    assert torch.equal(flat(model), weights)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_gives_a_factor_of_1_and_enters_no_statistic(bad):
    kind = clipping()
    for norm in (1.0, 1.2, 0.9, 1.1, 1.0):
        kind(MODEL, NORMS, OPEN).scale_update(partial(torch.tensor, norm), OPEN)
    before = kind.state_dict()
    clipped = kind(MODEL, NORMS, OPEN)
    assert clipped.scale_update(partial(torch.tensor, bad), OPEN) == 1
    assert equal_trees(kind.state_dict(), before)


def test_a_repeated_update_gets_the_factor_of_its_step():
    kind = clipping()
    for norm in (1.0, 1.2, 0.9, 1.1):
        kind(MODEL, NORMS, OPEN).scale_update(partial(torch.tensor, norm), OPEN)
    clipped = kind(MODEL, NORMS, OPEN)
    first = clipped.scale_update(lambda: torch.tensor(9.0), OPEN).clone()
    before = kind.state_dict()
    assert clipped.scale_update(lambda: torch.tensor(0.1), OPEN) == first < 1
    assert equal_trees(kind.state_dict(), before)


def test_the_recheck_of_one_tensor_repeats_a_scaled_update_bit_for_bit():
    state, kind = fresh_for("update_norm"), clipping(**TIGHT)
    tools = build_tools(PRECISIONS["fp32"](), clipping=kind)
    plain = fresh_for("update_norm")
    alone = build_tools(PRECISIONS["fp32"](), clipping=clipping(**TIGHT))
    tools.guard.recheck = Recheck(1)
    readings = [train_step(state, [batch(number)], tools) for number in range(6)]
    others = [train_step(plain, [batch(number)], alone) for number in range(6)]
    assert [each.recheck_update for each in readings] == [0.0] * 6
    assert min(each.clip_coef for each in readings) < 1
    assert [each.clip_coef for each in readings] == [each.clip_coef for each in others]
    assert same(bits(state), bits(plain)), "the repetition must not enter the statistics"


def test_the_reading_reports_the_factor_and_a_withheld_step_reports_1():
    state, kind = fresh_for("update_norm"), clipping(**TIGHT)
    tools = build_tools(PRECISIONS["fp32"](), clipping=kind)
    for number in range(5):
        reading = train_step(state, [batch(number)], tools)
    bad = batch(5)
    bad.inputs[0, 0, 0, 0] = math.nan
    before = kind.state_dict()
    withheld = train_step(state, [bad], tools)
    assert (withheld.applied, withheld.clip_coef) == (False, 1.0)
    assert equal_trees(kind.state_dict(), before)
    reading = train_step(state, [batch(6)], tools)
    assert reading.clip_active == float(reading.clip_coef < 1)


def test_without_clipping_of_updates_no_norm_is_computed(monkeypatch):
    from stabletrain.stability.optimizers import gated

    monkeypatch.setattr(gated, "norm_per_rate", None)
    state = fresh_for("update_norm")
    train_step(state, [batch()], build_tools(PRECISIONS["fp32"]()))
    assert state.optimizer.scale_update is None


def test_an_earlier_steps_clipping_does_not_scale_a_repeated_step():
    """As in an investigation, which repeats an update outside of any step."""
    state = fresh_for("update_norm")
    train_step(state, [batch()], build_tools(PRECISIONS["fp32"](), clipping=clipping()))
    assert state.optimizer.scale_update is not None
    apply(state.optimizer, OPEN)
    assert state.optimizer.scale_update is None


def test_a_withheld_update_is_no_outlier():
    """Behind a closed gate its moments are those of the step before, so its norm says nothing of this step."""
    kind = clipping()
    for norm in (1.0, 1.2, 0.9, 1.1):
        kind(MODEL, NORMS, OPEN).scale_update(partial(torch.tensor, norm), OPEN)
    assert kind(MODEL, NORMS, CLOSED).scale_update(lambda: torch.tensor(9.0), CLOSED) == 1
    assert kind(MODEL, NORMS, OPEN).scale_update(lambda: torch.tensor(9.0), OPEN) < 1
