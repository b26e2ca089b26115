"""Attention gate: the closed form in float64, its slope in half precision, and what it changes in a GPT."""

import pytest
import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.models.sampling import generate
from stabletrain.stability.attention_gate import Gate, NoAttentionGate, SigmoidGate
from stabletrain.stability.init import FanInInit, GPT2Init, NormalInit, SmallInit, TorchInit, ZeroResidualInit
from stabletrain.stability.optimizers.muon import hidden_matrices
from stabletrain.stability.parameter_roles import WeightDecay
from tests.models.given import small

N_EMBD, N_HEAD = 12, 3
each_kind = pytest.mark.parametrize("per", ["head", "element"])


def gate(per: str, bias: bool = True) -> Gate:
    torch.manual_seed(0)
    made = SigmoidGate(per)(N_EMBD, N_HEAD, bias)
    assert isinstance(made, Gate)
    return made.double()


def inputs() -> tuple[Tensor, Tensor]:
    """Attention's output, as attention returns it, and its input."""
    drawn = torch.Generator().manual_seed(1)
    y = torch.randn(2, N_HEAD, 5, N_EMBD // N_HEAD, dtype=torch.float64, generator=drawn).transpose(1, 2)
    return y, torch.randn(2, 5, N_EMBD, dtype=torch.float64, generator=drawn)


@each_kind
def test_each_head_or_value_is_multiplied_by_the_sigmoid_of_its_own_score(per: str) -> None:
    made, (y, x) = gate(per), inputs()
    found, weight, bias = made(y, x), made.projection.weight, made.projection.bias
    for head in range(N_HEAD):
        for i in range(4):
            row = head if per == "head" else 4 * head + i
            score = x @ weight[row] + bias[row]
            torch.testing.assert_close(found[:, :, head, i], y[:, :, head, i] / (1 + torch.exp(-score)))


@each_kind
def test_the_gradient_is_that_of_the_formula(per: str) -> None:
    made, (y, x) = gate(per, bias=False), inputs()
    weight = made.projection.weight.detach().clone().requires_grad_()
    y, x = y[:1, :2].clone().requires_grad_(), x[:1, :2].clone().requires_grad_()

    def formula(weight: Tensor, y: Tensor, x: Tensor) -> Tensor:
        scores = torch.einsum("oi,bti->bto", weight, x).view(1, 2, N_HEAD, -1)
        return y / (1 + torch.exp(-scores))

    grad = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad(formula(weight, y, x), (weight, y, x), grad)
    found = torch.autograd.grad(made(y, x), (made.projection.weight, y, x), grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_gate_that_is_almost_open_has_a_slope_in_bf16() -> None:
    made = gate("head").bfloat16()
    nn.init.zeros_(made.projection.weight)
    nn.init.constant_(made.projection.bias, 8.0)
    y, x = (each.bfloat16() for each in inputs())
    made(y, x).sum().backward()
    assert made(y, x).dtype == torch.bfloat16
    assert made.projection.bias.grad is not None
    assert made.projection.bias.grad.all(), "a sigmoid of 8 is 1 in bf16, and 1 has no slope"


@each_kind
def test_a_gpt_gates_its_attention_by_the_normed_input_of_the_block(per: str) -> None:
    """What reaches the output projection, and what query, key and value read."""
    model, seen = small(n_layer=1, attention_gate=SigmoidGate(per)), {}
    attention = model.blocks[0].attention
    for name in ("query", "dot_product", "out"):
        module = attention.get_submodule(name)
        module.register_forward_hook(lambda _, given, made, name=name: seen.update({name: (given[0], made)}))
    model(torch.arange(8).view(1, 8))
    y, x = seen["dot_product"][1].transpose(1, 2), seen["query"][0]
    assert (x.mean(-1).abs() < 1e-5).all(), "it is normed"
    scores = (x @ attention.gate.projection.weight.T).unflatten(-1, (4, -1))
    torch.testing.assert_close(seen["out"][0], (y * scores.sigmoid()).flatten(2))


def test_gates_of_one_half_are_an_output_projection_of_half_the_size() -> None:
    gated, plain = small(attention_gate=SigmoidGate("head")), small()
    with torch.no_grad():
        for block in gated.blocks:
            block.attention.gate.projection.weight.zero_()
        gated.load_state_dict(plain.state_dict(), strict=False)
        for block in plain.blocks:
            block.attention.out.weight.mul_(0.5)
    tokens = torch.arange(12).view(1, 12)
    torch.testing.assert_close(gated(tokens), plain(tokens))


@each_kind
def test_a_token_changes_no_logits_before_it_and_the_cache_changes_none(per: str) -> None:
    model = small(attention_gate=SigmoidGate(per))
    one, two = torch.arange(12).view(1, 12), torch.cat([torch.arange(7), torch.arange(20, 25)]).view(1, 12)
    assert torch.equal(model(one)[:, :7], model(two)[:, :7])
    cache = model.new_cache()
    pieces = torch.cat([model(piece, cache) for piece in one.split([5, 1, 4, 2], dim=1)], dim=1)
    torch.testing.assert_close(pieces, model(one), rtol=1e-5, atol=1e-5)
    cached = generate(model, one[:, :3], 12, temperature=0.0)
    assert torch.equal(model(cached[:, :-1])[:, 2:].argmax(-1), cached[:, 3:])


def test_without_a_gate_nothing_is_added_and_no_random_number_is_drawn() -> None:
    assert NoAttentionGate()(N_EMBD, N_HEAD, bias=True) is None
    torch.manual_seed(0)
    model, after = GPT(vocab_size=5, n_layer=1, attention_gate=NoAttentionGate()), torch.rand(1)
    torch.manual_seed(0)
    other = GPT(vocab_size=5, n_layer=1)
    assert torch.equal(torch.rand(1), after)
    assert repr(model) == repr(other)
    assert not [name for name in model.state_dict() if "gate" in name]


@pytest.mark.parametrize(
    ("init", "std"),
    [
        (GPT2Init(0.02), 0.02),
        (NormalInit(0.05), 0.05),
        (FanInInit(), 64**-0.5),
        (SmallInit(), (2 / (5 * 64)) ** 0.5),
        (ZeroResidualInit(), 0.02),
        (TorchInit(), 64**-0.5 / 3**0.5),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, float) else "",
)
def test_every_init_writes_a_gate_as_it_writes_a_query(init: TorchInit, std: float) -> None:
    """So all gates start around 1/2, and a head starts with half its output."""
    torch.manual_seed(0)
    model = GPT(vocab_size=64, n_layer=2, n_embd=64, bias=True, attention_gate=SigmoidGate("element"))
    init(model)
    for block in model.blocks:
        for linear in (block.attention.gate.projection, block.attention.query):
            assert linear.weight.std().item() == pytest.approx(std, rel=0.05)
    assert model.blocks[0].attention.gate.projection not in model.residual_projections()


def test_a_gates_weight_is_a_hidden_matrix_and_decays() -> None:
    model = GPT(vocab_size=8, n_layer=1, bias=True, attention_gate=SigmoidGate("head"))
    projection = model.blocks[0].attention.gate.projection
    assert any(each is projection.weight for each in hidden_matrices(model))
    with_decay, without = WeightDecay(0.1).groups(model, 1e-3)
    assert any(each is projection.weight for each in with_decay["params"])
    assert any(each is projection.bias for each in without["params"])


def test_another_kind_of_gate_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_gate.per=token is unknown: choose head or element"):
        SigmoidGate("token")
