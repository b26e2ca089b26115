"""Muon: orthogonal steps for hidden matrices, AdamW for the rest, and the same bits after a copy or a load."""

import copy
import math

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.stability.optimizers import AdamW, Muon
from stabletrain.stability.optimizers.muon import COEFFICIENTS, hidden_matrices, orthogonal
from stabletrain.stability.schedule import Constant, LearningRate, NoWarmup
from stabletrain.step import apply
from tests.stability.optimizers.given import ADAM, MUON, Two


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
    # Five Newton-Schulz iterations bring every singular value to about 0.7 to 1.2 times the factor.
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


def test_muon_continues_bitwise_after_a_copy_and_after_a_load():
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


OPEN = torch.tensor(True)


def gpt(**given):
    torch.manual_seed(0)
    return GPT(vocab_size=7, block_size=4, n_layer=1, n_head=2, n_embd=8, **given)


def fill(model, seed, size=1.0):
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = size * torch.randn_like(p)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "theirs"), [("match_rms", "match_rms_adamw"), ("original", None)])
def test_hidden_matrices_get_the_bits_of_pytorchs_muon(nesterov, scale, theirs):
    """And their momentum: checkpoints of either are those of the other."""
    model, reference = gpt(), gpt()
    ours = Muon(**MUON | {"nesterov": nesterov, "scale": scale})(model)
    settings = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95, "nesterov": nesterov, "adjust_lr_fn": theirs}
    pytorchs = torch.optim.Muon(hidden_matrices(reference), **settings)
    for seed in range(12):
        fill(model, seed, size := 10.0 ** (seed - 9))
        fill(reference, seed, size)
        apply(ours, OPEN)
        pytorchs.step()
    for own, other in zip(hidden_matrices(model), hidden_matrices(reference), strict=True):
        assert torch.equal(own, other)
        assert torch.equal(ours.state[own]["momentum_buffer"], pytorchs.state[other]["momentum_buffer"])


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 4, 6), (2, 6, 4)])
def test_orthogonal_is_newton_schulz_on_the_singular_values(shape):
    """In float64: U p(...p(S / |S|)) V^T with p(s) = a s + b s^3 + c s^5; of each matrix by itself."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(3):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonal(x, 3).double(), u @ torch.diag_embed(s) @ v, rtol=0, atol=0.03)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-25, 1e-8, 1.0, 1e18])
def test_zero_tiny_and_rank_one_gradients_have_a_finite_direction(size, per_head):
    for rank_one in (False, True):
        model = gpt()
        optimizer = Muon(**MUON, per_head=per_head)(model)
        for seed in range(3):
            fill(model, seed, size)
            if rank_one:
                for p in hidden_matrices(model):
                    p.grad = torch.outer(p.grad[:, 0], p.grad[0]) / p.grad.abs().max().clamp(min=1e-45)
            apply(optimizer, OPEN)
        assert all(p.isfinite().all() for p in model.parameters())
        assert all(optimizer.state[p]["momentum_buffer"].isfinite().all() for p in hidden_matrices(model))


def updates(model, optimizer):
    """Returns what a step subtracts from each parameter."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    apply(optimizer, OPEN)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


QKV = ("query", "key", "value")


def test_per_head_orthogonalises_each_head_of_query_key_and_value_and_nothing_else():
    """The RMS of each head's update stays AdamW's 0.2, and no head feels another one's gradients."""
    settings = MUON | {"weight_decay": 0.0}
    model, whole = gpt(), gpt()
    optimizer = Muon(**settings, per_head=True)(model)
    for each in (model, whole):
        fill(each, 1)
    found, without = updates(model, optimizer), updates(whole, Muon(**settings)(whole))
    louder = gpt()
    fill(louder, 1)
    for name in QKV:
        louder.get_parameter(f"blocks.0.attention.{name}.weight").grad[:4] *= 1024
    loud = updates(louder, Muon(**settings, per_head=True)(louder))
    for name in found:
        if not name.endswith(tuple(f"attention.{projection}.weight" for projection in QKV)):
            assert torch.equal(found[name], without[name]), name
            continue
        sizes = torch.linalg.svdvals(found[name].unflatten(0, (2, 4)).double()) / (0.01 * 0.2 * math.sqrt(8))
        assert sizes.min() > 0.5, name
        assert sizes.max() < 1.3, name
        assert torch.equal(loud[name], found[name]), name


def test_per_head_is_refused_without_heads():
    with pytest.raises(ConfigError, match=r"per_head=true: no module of Two has a method `heads\(\)`.* fix: opt"):
        Muon(**MUON, per_head=True)(Two())


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        ("match_rms", lambda m, n: 0.2 * math.sqrt(max(m, n))),
        ("original", lambda m, n: math.sqrt(max(1, m / n))),
        ("spectral", lambda m, n: math.sqrt(m / n)),
    ],
)
def test_scales_multiply_the_direction_by_their_function_of_the_shape(scale, factor):
    for per_head in (False, True):
        model = gpt()
        fill(model, 1)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found = updates(model, Muon(**MUON | {"weight_decay": 0.0}, scale=scale, per_head=per_head)(model))
        for name in ("blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "blocks.0.attention.query.weight"):
            split = per_head and "query" in name
            ahead = gradients[name] * (0.05 + 0.95 * 0.05)  # Nesterov: (1 - p) g + p (1 - p) g, from momentum 0
            ahead = ahead.unflatten(0, (2, 4)) if split else ahead
            expected = 0.01 * factor(*ahead.shape[-2:]) * orthogonal(ahead, 5).double().flatten(end_dim=-2)
            torch.testing.assert_close(found[name].double(), expected, rtol=0.02, atol=1e-5)


def test_cautious_decay_shrinks_the_weights_that_the_update_shrinks_too():
    """w <- w - lr (u + decay w [u w >= 0]) in float64, with the update u of a run without decay."""
    model, plain = gpt(), gpt()
    cautious, without = Muon(**MUON, cautious_decay=True)(model), Muon(**MUON | {"weight_decay": 0.0})(plain)
    for seed in range(3):
        plain.load_state_dict(model.state_dict())
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        fill(model, seed)
        fill(plain, seed)
        found, update = updates(model, cautious), updates(plain, without)
        decayed = {p for group in cautious.param_groups if group["weight_decay"] for p in group["params"]}
        for name, p in model.named_parameters():
            own = update[name].double()
            decay = 0.001 * before[name] * (own * before[name] >= 0) if p in decayed else 0.0
            torch.testing.assert_close(found[name].double(), own + decay, rtol=1e-4, atol=2e-7, msg=name)


def test_the_momentum_of_a_step_depends_on_its_number_alone():
    model = gpt()
    optimizer = Muon(**MUON, momentum_low=0.5, momentum_warmup=4, momentum_cooldown=2)(model)
    rate = LearningRate(NoWarmup(), Constant(), 10)

    def momentum(step):
        rate.set_(optimizer.param_groups, step, 0.1)
        [hidden] = [group for group in optimizer.param_groups if "ns_steps" in group]
        return hidden["momentum"]

    steps = [0, 2, 4, 8, 9, 2, 0]
    found = [momentum(step) for step in steps]
    assert found == pytest.approx([0.5, 0.725, 0.95, 0.95, 0.725, 0.725, 0.5])
    assert all("momentum" not in group for group in optimizer.param_groups if "ns_steps" not in group)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": "rms"}, "optimizer.scale=rms is unknown: choose match_rms or original or spectral"),
        ({"momentum_warmup": -1}, "optimizer.momentum_warmup=-1 is below 0"),
        ({"momentum_warmup": 3, "momentum_low": 0.95}, "the momentum rises from it"),
        ({"momentum_low": 0.5}, "does nothing without optimizer.momentum_warmup"),
    ],
)
def test_mistakes_in_muons_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Muon(**MUON, **given)


class Gated(nn.Module):
    """An attention gate of one row a head beside a linear layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.head = nn.Linear(4, 2), nn.Linear(4, 6), nn.Linear(6, 7)


def test_a_gate_with_one_row_a_head_is_a_hidden_matrix():
    model = Gated()
    assert hidden_matrices(model) == [model.gate.weight, model.up.weight]
