"""Laws for every optimizer: a closed gate changes nothing, state stays finite, and resume is bitwise exact."""

import pytest
import torch
from torch import nn

from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.tree import map_tensors
from stabletrain.records import TrainState
from stabletrain.stability.optimizers import SGD, SPAM, AdamW, Muon, StableAdamW
from stabletrain.stability.schedule import Constant, LearningRate, NoWarmup
from stabletrain.step import apply

ADAM = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
MUON = ADAM | {"momentum": 0.95, "nesterov": True, "ns_steps": 5}
RATE = LearningRate(NoWarmup(), Constant(), 6)
KINDS = {
    "adamw": AdamW(**ADAM),
    "adamw-unfused": AdamW(**ADAM, fused=False),
    "adamw-cautious": AdamW(**ADAM, cautious_decay=True),
    "sgd": SGD(lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "stable_adamw": StableAdamW(**ADAM),
    "spam": SPAM(**ADAM, theta=50.0, reset_interval=4, warmup_steps=2),
    "muon": Muon(**MUON),
    "muon-cautious": Muon(**MUON, cautious_decay=True),
    "muon-scheduled": Muon(**MUON, decay="corrected", scale="original", momentum_warmup=3, momentum_cooldown=2),
}
OPEN, CLOSED = torch.tensor(True), torch.tensor(False)


class Net(nn.Module):
    """An embedding, a norm, a hidden matrix, a kernel in channels_last, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 4)
        self.kernel = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)
        self.to(memory_format=torch.channels_last)


def fresh(kind):
    torch.manual_seed(0)
    model = Net()
    return TrainState(model, KINDS[kind](model))


def fill(state, value):
    """Sets every parameter's gradient to `value`, or to random values of this seed."""
    torch.manual_seed(value if isinstance(value, int) else 0)
    for p in state.model.parameters():
        p.grad = torch.randn_like(p) if isinstance(value, int) else torch.full_like(p, value)


def bits(state):
    tree = capture(state, {})
    return map_tensors(torch.clone, {"model": tree["model"], "state": tree["optimizer"]["state"]})


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


def finite(state):
    tensors = [*state.model.parameters(), *(v for s in state.optimizer.state.values() for v in s.values())]
    return all(torch.isfinite(t).all() for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_update_changes_no_bit_of_the_state_or_of_later_updates(kind, bad):
    state, clean = fresh(kind), fresh(kind)
    for seed in (1, 2):
        for each in (state, clean):
            fill(each, seed)
            apply(each.optimizer, OPEN)
    before = bits(state)
    fill(state, bad)
    apply(state.optimizer, CLOSED)
    assert equal(bits(state), before)
    for seed in (3, 4, 5, 6):
        for each in (state, clean):
            fill(each, seed)
            apply(each.optimizer, OPEN)
    assert equal(bits(state), bits(clean))
    assert finite(state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e17])
def test_no_gradient_that_the_gate_lets_through_makes_anything_non_finite(kind, size):
    """1e17 in each of these 200 values has a norm of 1.4e18, which is still finite when squared."""
    state = fresh(kind)
    for value in (size, 1.0, size, 0.0, size, -size, 1e-3, 0.0):
        fill(state, value)
        apply(state.optimizer, OPEN)
        assert finite(state), value


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_first_update_changes_nothing_even_in_memory_full_of_nan(kind):
    """PyTorch's fused SGD allocates its momentum uninitialised, and does not write it if the update is skipped."""
    state, clean = fresh(kind), fresh(kind)
    for _ in range(8):  # what the allocator will hand out next
        kept = [torch.full_like(p, float("nan")) for p in state.model.parameters() for _ in range(8)]
        del kept
    fill(state, float("nan"))
    apply(state.optimizer, CLOSED)
    for seed in (1, 2, 3):
        for each in (state, clean):
            fill(each, seed)
            apply(each.optimizer, OPEN)
    assert finite(state)
    for (name, p), other in zip(state.model.named_parameters(), clean.model.parameters(), strict=True):
        assert torch.equal(p, other), name


def test_momentum_exists_before_the_first_step_and_does_not_change_that_step():
    ours, torchs = fresh("sgd"), fresh("sgd")
    assert all((s["momentum_buffer"] == 0).all() for s in ours.optimizer.state.values())
    torchs.optimizer.state.clear()
    for seed in (1, 2):
        for each in (ours, torchs):
            fill(each, seed)
            apply(each.optimizer, OPEN)
    assert equal(bits(ours), bits(torchs))


@pytest.mark.parametrize("kind", ["adamw-cautious", "stable_adamw", "spam"])
def test_even_a_gradient_whose_square_is_infinite_leaves_no_infinite_moment(kind):
    """Applies an update that the guard would skip: PyTorch's AdamW would keep v = Inf forever."""
    state = fresh(kind)
    for value in (1.0, 1e30, -1e30, 1.0, 1.0):
        fill(state, value)
        apply(state.optimizer, OPEN)
        assert finite(state), value
    before = [p.detach().clone() for p in state.model.parameters()]
    for seed in range(20):
        fill(state, seed)
        apply(state.optimizer, OPEN)
    assert finite(state)
    assert all(not torch.equal(p, b) for p, b in zip(state.model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gate_is_read_on_the_device(kind):
    """Otherwise `step.apply` needs one host read per step."""
    assert getattr(fresh(kind).optimizer, "_step_supports_amp_scaling", False) == (kind != "adamw-unfused")


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_optimizer_continues_bitwise(kind):
    whole, first, second = fresh(kind), fresh(kind), fresh(kind)
    fill(second, 99)
    apply(second.optimizer, OPEN)  # so that there is something to overwrite
    for step in range(6):
        fill(whole, step)
        RATE.set_(whole.optimizer.param_groups, step, 1 / (step + 1))
        apply(whole.optimizer, OPEN)
    for step in range(3):
        fill(first, step)
        RATE.set_(first.optimizer.param_groups, step, 1 / (step + 1))
        apply(first.optimizer, OPEN)
    saved = map_tensors(torch.clone, capture(first, {}))
    for target in (second, fresh(kind)):
        restore(saved, target, {})
        for step in range(3, 6):
            fill(target, step)
            RATE.set_(target.optimizer.param_groups, step, 1 / (step + 1))
            apply(target.optimizer, OPEN)
        assert equal(bits(target), bits(whole))
