"""AdamW, StableAdamW and SPAM against formulas written out in float64."""

import itertools
import math

import pytest
import torch
from torch import nn

from stabletrain.stability.optimizers import SPAM, AdamW, StableAdamW
from stabletrain.stability.optimizers.adamw import GatedAdamW
from tests.stability.optimizers.given import ADAM, SPAM_, Two


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


def stepped(kind, steps, dtype):
    """Trains a small model on random gradients with a learning rate that varies; returns model and optimizer."""
    torch.manual_seed(0)
    model = Two().to(dtype)
    optimizer = kind(model)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = ADAM["lr"] * (1 + step % 3) / 3
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-14), (torch.float32, 2e-6)], ids=["fp64", "fp32"])
def test_our_own_adamw_equals_pytorchs_within_rounding_over_50_steps(dtype, most):
    (ours, own), (theirs, pytorchs) = (stepped(AdamW(**ADAM, shows_update=each), 50, dtype) for each in (True, False))
    assert (type(own), type(pytorchs)) == (GatedAdamW, torch.optim.AdamW)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=most)
        assert own.state[a].keys() == pytorchs.state[b].keys()
        torch.testing.assert_close(own.state[a], pytorchs.state[b], rtol=most, atol=most)


@pytest.mark.parametrize(
    "kinds",
    [(AdamW, {}), (StableAdamW, {}), (SPAM, {"theta": 1.5, "reset_interval": 4, "warmup_steps": 2})],
    ids=["adamw", "stable_adamw", "spam"],
)
def test_cautious_decay_is_the_formula_in_float64(kinds):
    """w - lr (u + decay [u w >= 0] w): u from the same optimizer without weight decay, from the same start."""
    kind, more = kinds
    torch.manual_seed(0)
    cautious, plain = nn.Linear(4, 3, bias=False).double(), nn.Linear(4, 3, bias=False).double()
    with_decay = kind(**ADAM | {"weight_decay": 0.5}, **more, cautious_decay=True)(cautious)
    without = kind(**ADAM | {"weight_decay": 0.0}, **more, cautious_decay=True)(plain)
    shares = []
    for gradient in gradients(12):
        start = cautious.weight.detach().clone()
        plain.weight.data.copy_(start)
        for layer, optimizer in ((cautious, with_decay), (plain, without)):
            layer.weight.grad = gradient.clone()
            optimizer.step()
        update = start - plain.weight.detach()
        decays = (update * start >= 0).double()
        shares.append(float(decays.mean()))
        expected = start - update - 0.01 * 0.5 * decays * start
        torch.testing.assert_close(cautious.weight.detach(), expected, rtol=1e-12, atol=1e-14)
    assert min(shares) > 0
    assert max(shares) < 1


def gradients(steps, shape=(3, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def trained(kind, grads, layer=None):
    torch.manual_seed(0)
    layer = layer or nn.Linear(4, 3, bias=False)
    start = layer.weight.detach().double().clone()
    optimizer = kind(layer)
    for g in grads:
        layer.weight.grad = g.float()
        optimizer.step()
    return start, layer.weight.detach().double(), optimizer


def stable_adamw(w, grads, lr, betas, eps, weight_decay):
    m = v = torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        v_hat = v / (1 - betas[1] ** t)
        rms = float((g**2 / v_hat.clamp(min=eps**2)).mean().sqrt())
        eta = lr / max(1.0, rms)
        w = w - lr * weight_decay * w - eta * (m / (1 - betas[0] ** t)) / (v_hat.sqrt() + eps)
    return w


def test_stable_adamw_equals_the_formula_through_a_spike():
    grads = gradients(6)
    grads[3] = 100 * grads[3]
    start, end, _ = trained(StableAdamW(**ADAM), grads)
    torch.testing.assert_close(end, stable_adamw(start, grads, **ADAM), rtol=1e-5, atol=1e-7)


def test_stable_adamw_takes_a_spike_with_a_shorter_step_than_adamw():
    torch.manual_seed(0)
    calm, spike = [torch.full((3, 4), 1e-3, dtype=torch.float64)] * 50, torch.full((3, 4), 1.0, dtype=torch.float64)
    moved = {}
    for kind in (StableAdamW, AdamW):
        _, before, _ = trained(kind(**ADAM | {"weight_decay": 0.0}), calm)
        _, after, _ = trained(kind(**ADAM | {"weight_decay": 0.0}), [*calm, spike])
        moved[kind] = float((after - before).square().mean().sqrt())
    rms = 1 / math.sqrt(0.05)  # v is 0.05 g^2 just after the spike
    assert moved[StableAdamW] == pytest.approx(moved[AdamW] / rms, rel=0.1)


def test_stable_adamw_is_adamw_while_v_follows_the_gradients():
    grads = [torch.full((3, 4), 0.5, dtype=torch.float64)] * 5  # v is g^2, so the RMS is 1
    _, stable, _ = trained(StableAdamW(**ADAM), grads)
    _, plain, _ = trained(AdamW(**ADAM), grads)
    torch.testing.assert_close(stable, plain, rtol=1e-5, atol=1e-7)


def spam(w, grads, lr, betas, eps, weight_decay, theta, reset_interval, warmup_steps):
    m = v = torch.zeros_like(w)
    t, resets = 0, 0
    for g in grads:
        if t == reset_interval:
            m = v = torch.zeros_like(w)
            t, resets = 0, resets + 1
        v_hat = v / (1 - betas[1] ** t) if t else v
        spiking = (v > 0) & (g**2 > theta * v_hat)
        g = torch.where(spiking, g.sign() * (theta * v_hat).sqrt(), g)
        rise = 1.0
        if resets and t < warmup_steps:
            rise = 1 - 0.99 * (1 + math.cos(math.pi * t / (warmup_steps + 1))) / 2
        t += 1
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        update = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        w = w - lr * weight_decay * w - lr * rise * update
    return w


def test_spam_equals_the_formula_through_spikes_and_two_resets():
    grads = gradients(11)
    grads[2][0] *= 100  # one row spikes
    grads[6][1, 1] = 1e4
    start, end, optimizer = trained(SPAM(**SPAM_), grads)
    torch.testing.assert_close(end, spam(start, grads, **SPAM_), rtol=1e-5, atol=1e-7)
    (state,) = optimizer.state.values()
    assert (state["step"].item(), state["resets"]) == (3, 2)


def test_spam_does_not_clip_a_coordinate_that_had_no_gradient_before():
    first, then = torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    first[0, 0] = 0.0
    start, end, _ = trained(SPAM(**SPAM_ | {"weight_decay": 0.0}), [first, then])
    assert abs(float(end[0, 0] - start[0, 0])) > 0.5 * SPAM_["lr"]


def test_spam_after_a_reset_takes_steps_of_the_size_of_the_first_ones():
    grads = [torch.ones(3, 4, dtype=torch.float64)] * 9
    kind = SPAM(**SPAM_ | {"weight_decay": 0.0, "warmup_steps": 0})
    ends = [trained(kind, grads[:n])[1] for n in range(1, 10)]
    steps = [float((b - a).abs().mean()) for a, b in itertools.pairwise(ends)]
    assert steps == pytest.approx([SPAM_["lr"]] * 8, rel=1e-3), "the bias correction restarts with the moments"
