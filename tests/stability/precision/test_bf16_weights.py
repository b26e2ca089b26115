"""Parameters stored in bf16: rounding is unbiased, steps and resume are exact, a skipped step changes nothing."""

import copy
import math

import pytest
import torch
from torch import nn

from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.tree import map_tensors
from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.machine.determinism import Seeded
from stabletrain.models.resnet import CifarResNet
from stabletrain.monitors.tensor_norms import measure
from stabletrain.records import TrainState
from stabletrain.stability import precision
from stabletrain.stability.optimizers import SGD, AdamW
from stabletrain.stability.precision.bf16_weights import Bf16Module, round_stochastically
from stabletrain.step import apply

CPU = torch.device("cpu")
OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "adamw_unfused": AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=False),
    "sgd": SGD(lr=1e-2, momentum=0.9, nesterov=False, weight_decay=0.1),
}


class Small(nn.Module):
    """An embedding, a norm, two linear layers and a convolution: some stored in bf16, some in fp32."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 11, bias=False)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x + self.conv(x.mT).mT)


def made(optimizer="adamw", seed=0, **changed):
    torch.manual_seed(seed)
    acting = precision.bf16_params(CPU, **changed)
    model = Small()
    acting.wrap_fp32_modules(model)
    state = TrainState(model, OPTIMIZERS[optimizer](model))
    acting.attach(model, state.optimizer)
    return acting, state


def train(acting, state, steps, *, poison=None):
    """`steps` steps on random tokens, each a function of its number; the gate as the guard would set it."""
    for _ in range(steps):
        Seeded().seed_step(0, state.step)
        tokens = torch.randint(11, (4, 8))
        state.optimizer.zero_grad()
        with acting.autocast():
            logits = state.model(tokens)
        nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        if poison is not None:
            state.model.up.weight.grad[0, 0] = poison
        apply(state.optimizer, torch.isfinite(measure(state.model).total))
        state.step += 1


def bits(state):
    """Everything a step may change, copied."""
    return map_tensors(torch.clone, capture(state, {}))


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, list) else a == b


@pytest.mark.parametrize("x", [1.0 + 1e-3, -3.7, 1e-40, -1e-30, 3.1e38, math.pi])
def test_the_mean_of_many_roundings_is_the_value(x):
    torch.manual_seed(0)
    n = 1 << 16
    rounded = round_stochastically(torch.full((n,), x)).double()
    value = torch.tensor(x).double()
    down, up = rounded.min(), rounded.max()
    assert down < value < up
    assert torch.nextafter(down.bfloat16(), torch.tensor(math.inf, dtype=torch.bfloat16)) == up.bfloat16()
    share = (value - down) / (up - down)
    five_sigma = 5 * (up - down) * (share * (1 - share) / n).sqrt()
    assert (rounded.mean() - value).abs() <= five_sigma


def test_rounding_to_the_nearest_is_not_unbiased_so_the_bound_above_means_something():
    x = torch.full((1 << 16,), 1.0 + 1e-3)
    share = 1e-3 / 2**-7
    assert (x.bfloat16().double().mean() - x[0]).abs() > 5 * 2**-7 * math.sqrt(share * (1 - share) / len(x))


def test_every_value_that_bf16_has_rounds_to_itself():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for _ in range(4):
        rounded = round_stochastically(every.float())
        assert torch.equal(rounded.isnan(), every.isnan())
        known = ~every.isnan()
        assert torch.equal(rounded.view(torch.int16)[known], every.view(torch.int16)[known])


def test_rounding_makes_nothing_infinite_and_hides_nothing():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest]).repeat(1000)
    rounded = round_stochastically(x)
    assert torch.isfinite(rounded).all()
    assert torch.equal(rounded.float().abs(), torch.full_like(x, torch.finfo(torch.bfloat16).max))
    odd = torch.tensor([-1, 0x7F800001, -0x7FFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32).repeat(1000)
    assert odd.isnan().all()
    assert round_stochastically(odd).isnan().all()
    assert torch.equal(
        round_stochastically(torch.tensor([math.inf, -math.inf])).float().sign(), torch.tensor([1.0, -1.0])
    )


def test_matrices_and_kernels_are_bf16_and_everything_else_is_fp32():
    _, state = made()
    low = {name for name, p in state.model.named_parameters() if p.dtype == torch.bfloat16}
    assert low == {"up.weight", "down.weight", "conv.weight", "head.weight"}
    assert {p.dtype for name, p in state.model.named_parameters() if name not in low} == {torch.float32}
    assert list(state.model.state_dict()) == list(Small().state_dict())


def test_fp32_modules_and_shared_weights_stay_fp32():
    _, state = made(fp32_modules=["head"])
    assert state.model.head.weight.dtype == torch.float32
    nested, acting = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)), precision.bf16_params(CPU, ["0"])
    acting.wrap_fp32_modules(nested)
    acting.attach(nested, torch.optim.SGD(nested.parameters(), lr=0.1))
    assert (nested[0][0].weight.dtype, nested[1].weight.dtype) == (torch.float32, torch.bfloat16)
    model = Small()
    model.head.weight = model.embedding.weight
    precision.bf16_params(CPU).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.head.weight.dtype == torch.float32
    assert not isinstance(model.head, Bf16Module)
    assert model.up.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("make", [Small, lambda: CifarResNet(depth=8, num_classes=10, in_channels=1)])
def test_forward_and_backward_are_bf16_autocasts_to_the_bit(make):
    torch.manual_seed(0)
    model = make()
    inputs = torch.randint(11, (2, 8)) if isinstance(model, Small) else torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    model_copy = copy.deepcopy(model)
    acting = precision.bf16_params(CPU)
    acting.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    outputs = []
    for each in (model, model_copy):
        with acting.autocast():
            outputs.append(each(inputs))
        outputs[-1].float().square().sum().backward()
    assert torch.equal(*outputs)
    assert all(
        torch.equal(a.grad.float(), b.grad) for a, b in zip(model.parameters(), model_copy.parameters(), strict=True)
    )
    assert torch.equal(model(inputs), model_copy(inputs)), "outside of autocast the layers compute in fp32"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_the_fp32_step_rounded(optimizer):
    acting, state = made(optimizer)
    train(acting, state, 3)
    before = bits(state)
    model_copy = Small()
    model_copy.load_state_dict({name: value.float() for name, value in state.model.state_dict().items()})
    reference = TrainState(model_copy, OPTIMIZERS[optimizer](model_copy))
    restore(before, reference, {})
    gradients = torch.Generator().manual_seed(1)
    for (_, a), (_, b) in zip(state.model.named_parameters(), model_copy.named_parameters(), strict=True):
        a.grad = torch.randn(a.shape, generator=gradients).to(a.dtype)
        b.grad = a.grad.float()
    for each in (state, reference):
        apply(each.optimizer, torch.tensor(True))
    for (name, a), (_, b) in zip(state.model.named_parameters(), model_copy.named_parameters(), strict=True):
        gap = torch.finfo(torch.bfloat16).eps * b.abs() if a.dtype == torch.bfloat16 else torch.zeros_like(b)
        assert ((a.float() - b).abs() <= gap).all(), name
        assert a.grad.dtype == a.dtype
    assert {v.dtype for values in state.optimizer.state.values() for v in values.values() if v is not None} == {
        torch.float32
    }
    assert equal(capture(state, {})["optimizer"]["state"], capture(reference, {})["optimizer"]["state"])


def test_updates_too_small_for_bf16_arrive_in_the_mean():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    nn.init.ones_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    precision.bf16_params(CPU).attach(model, optimizer)
    torch.manual_seed(0)
    for _ in range(100):
        model[0].weight.grad = torch.full((64, 64), -1e-4, dtype=torch.bfloat16)
        apply(optimizer, torch.tensor(True))
    moved = model[0].weight.detach().float().mean() - 1  # rounded to the nearest, nothing would ever move
    assert moved == pytest.approx(100 * 1e-4, rel=0.05)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("first", [True, False])
def test_a_skipped_step_changes_no_bit(optimizer, poison, first):
    acting, state = made(optimizer)
    train(acting, state, 0 if first else 3)
    before = bits(state)
    train(acting, state, 1, poison=poison)
    after = bits(state)
    assert equal(before["model"], after["model"])
    if not first:  # a fused optimizer makes its zero moments in any step
        assert equal(before["optimizer"], after["optimizer"])
    train(acting, state, 1)
    assert not equal(before["model"], bits(state)["model"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_is_exact(optimizer):
    acting, state = made(optimizer)
    train(acting, state, 2)
    saved = bits(state)
    train(acting, state, 3)
    again, other = made(optimizer, seed=7)
    restore(saved, other, {})
    train(again, other, 3)
    assert equal(bits(state), bits(other))
    addresses = [p.data_ptr() for p in other.model.parameters()]
    train(again, other, 1)
    assert [p.data_ptr() for p in other.model.parameters()] == addresses, "weights stay where they are in memory"


def test_bf16_params_is_refused_on_cards_without_bf16(monkeypatch):
    monkeypatch.setattr(hardware, "has_bf16", lambda device: False)
    monkeypatch.setattr(hardware, "name", lambda device: "Tesla V100")
    with pytest.raises(ConfigError, match="precision=bf16_params on Tesla V100.*precision=fp16"):
        precision.bf16_params(torch.device("cuda", 0))
    assert "slower" in precision.bf16_params(CPU).why


def test_a_model_without_weights_to_store_in_bf16_is_refused():
    model = nn.Sequential(nn.LayerNorm(4))
    with pytest.raises(ConfigError, match="no linear layer or convolution .*use precision=bf16"):
        precision.bf16_params(torch.device("cpu")).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
