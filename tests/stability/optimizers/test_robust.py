"""StableAdamW, SPAM and Muon against formulas written out in float64."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.stability.optimizers import SPAM, AdamW, Muon, StableAdamW

ADAM = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SPAM_ = ADAM | {"theta": 50.0, "reset_interval": 4, "warmup_steps": 2}
MUON = ADAM | {"momentum": 0.95, "nesterov": True, "ns_steps": 5}


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


def test_spam_leaves_a_coordinate_that_never_had_a_gradient_free_to_move():
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


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.head = nn.Linear(6, 7)

    def forward(self, inputs):
        return self.head(torch.relu(self.up(self.norm(self.embedding(inputs)))))


def test_muon_moves_hidden_matrices_along_orthogonal_directions_and_the_rest_as_adamw():
    torch.manual_seed(0)
    model, reference = Two(), Two()
    reference.load_state_dict(model.state_dict())
    optimizers = Muon(**MUON | {"weight_decay": 0.0})(model), AdamW(**ADAM | {"weight_decay": 0.0})(reference)
    before = model.up.weight.detach().clone()
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        torch.manual_seed(1)
        for p in each.parameters():
            p.grad = torch.randn_like(p)
        each.up.weight.grad[:, 0] *= 10  # one direction far longer than the others
        optimizer.step()
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if name != "up.weight":
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    sizes = torch.linalg.svdvals((model.up.weight.detach() - before).double())
    # five Newton-Schulz iterations bring every singular value to some 0.7 ... 1.2 of the factor
    assert sizes.max() < 1.3 * 0.2 * math.sqrt(6) * MUON["lr"]
    assert sizes.min() > 0.5 * 0.2 * math.sqrt(6) * MUON["lr"]


def test_muons_learning_rate_and_zero_grad_reach_both_parts():
    model = Two()
    optimizer = Muon(**MUON)(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model(torch.arange(7)).sum().backward()
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))


def test_muon_goes_on_with_the_same_bits_after_a_copy_and_after_a_load():
    torch.manual_seed(0)
    model = Two()
    optimizer = Muon(**MUON)(model)

    def take(each, owner, seed):
        torch.manual_seed(seed)
        for p in owner.parameters():
            p.grad = torch.randn_like(p)
        each.step()

    take(optimizer, model, 1)
    copied_model, copied = copy.deepcopy((model, optimizer))
    loaded_model = copy.deepcopy(model)
    loaded = Muon(**MUON)(loaded_model)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, owner in ((optimizer, model), (copied, copied_model), (loaded, loaded_model)):
        take(each, owner, 2)
    for name, p in model.named_parameters():
        assert torch.equal(copied_model.get_parameter(name), p), name
        assert torch.equal(loaded_model.get_parameter(name), p), name


def test_muon_is_refused_where_there_is_nothing_for_it():
    with pytest.raises(ConfigError, match="no hidden matrix.*optimizer=adamw"):
        Muon(**MUON)(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)))


@pytest.mark.parametrize("kind", [AdamW, StableAdamW, SPAM, Muon])
def test_independent_decay_shrinks_alike_at_every_learning_rate_and_coupled_does_not(kind):
    values = {AdamW: ADAM, StableAdamW: ADAM, SPAM: SPAM_, Muon: MUON}[kind] | {"weight_decay": 0.01}
    left = {}
    for decay in ("coupled", "independent"):
        for lr in (1e-4, 1e-2):
            torch.manual_seed(0)
            model = Two()
            start = model.up.weight.detach().double().clone()
            optimizer = kind(**values | {"lr": lr, "decay": decay})(model)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # the schedule, half-way down
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            left[decay, lr] = float((model.up.weight.detach().double() / start).mean())
    assert left["independent", 1e-4] == pytest.approx(1 - 0.5 * 0.01, abs=1e-6)
    assert left["independent", 1e-2] == pytest.approx(1 - 0.5 * 0.01, abs=1e-6)
    assert left["coupled", 1e-2] == pytest.approx(1 - 0.5 * 0.01 * 1e-2, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (SPAM, SPAM_ | {"theta": 0.5}, r"optimizer\.theta=0\.5"),
        (SPAM, SPAM_ | {"reset_interval": 0}, r"optimizer\.reset_interval=0"),
        (SPAM, SPAM_ | {"warmup_steps": 4}, r"optimizer\.warmup_steps=4 .*reset_interval=4"),
        (Muon, MUON | {"momentum": 1.0}, r"optimizer\.momentum=1\.0"),
        (Muon, MUON | {"momentum": 0.0}, r"optimizer\.nesterov=true"),
        (Muon, MUON | {"ns_steps": 0}, r"optimizer\.ns_steps=0"),
        (StableAdamW, ADAM | {"eps": 1e-50}, r"optimizer\.eps=1e-50"),
        (StableAdamW, ADAM | {"decay": "none"}, r"optimizer\.decay=none .*coupled or independent"),
        (AdamW, ADAM | {"decay": "independent", "weight_decay": 1.0}, r"optimizer\.weight_decay=1\.0"),
    ],
)
def test_a_bound_passed_is_named(kind, values, message):
    with pytest.raises(ConfigError, match=message):
        kind(**values)
