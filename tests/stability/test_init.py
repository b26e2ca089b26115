"""Init: every parameter of a GPT has the standard deviation its kind promises."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.stability.init import GPT2Init, TorchInit
from stabletrain.stability.qknorm import LayerNormQK
from stabletrain.stability.softcap import NoSoftcap

RESIDUAL = ("attention.out.weight", "mlp.down.weight")


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "n_layer": 3,
        "position": "learned",
        "mlp": "gelu",
        "bias": True,
        "tied_head": False,
    } | changes
    return GPT(
        vocab_size=64,
        block_size=32,
        n_head=2,
        n_embd=48,
        norm="layernorm",
        dropout=0.0,
        qknorm=LayerNormQK(1e-6),
        softcap=NoSoftcap(),
        **values,
    )


@pytest.mark.parametrize(
    "changes", [{}, {"mlp": "swiglu", "n_layer": 5}, {"bias": False, "tied_head": True, "position": "rope"}], ids=str
)
@pytest.mark.parametrize("std", [0.02, 0.1])
def test_gpt2_gives_every_parameter_its_standard_deviation(changes: dict[str, Any], std: float) -> None:
    model = gpt(**changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.fill_(7.0)  # so that one left alone shows
    GPT2Init(std)(model)
    seen = set()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            residual = name.endswith(RESIDUAL)
            expected = std / math.sqrt(2 * model.n_layer) if residual else std
            n = parameter.numel()
            assert parameter.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * n)), name
            assert parameter.mean().item() == pytest.approx(0.0, abs=5 * expected / math.sqrt(n)), name
            seen.add(residual)
    assert seen == {True, False}


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = gpt()
        torch.manual_seed(seed)
        GPT2Init(0.02)(model)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_gpt2_writes_in_place_and_leaves_nothing_to_backward() -> None:
    model = gpt()
    before = dict(model.named_parameters())
    GPT2Init(0.02)(model)
    assert all(p is before[name] and p.requires_grad and p.is_leaf for name, p in model.named_parameters())


def test_a_users_model_is_scaled_through_the_seam() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = [nn.Linear(64, 64) for _ in range(9)]
            self.layers = nn.ModuleList(self.linears)

        def residual_projections(self) -> list[nn.Linear]:
            return self.linears[:4]

    model = Mine()
    GPT2Init(0.02)(model)
    for i, layer in enumerate(model.linears):
        assert layer.weight.std().item() == pytest.approx(0.01 if i < 4 else 0.02, rel=0.06)
        assert not layer.bias.any()


def test_gpt2_on_a_model_without_residual_projections_is_refused_and_nothing_is_written() -> None:
    linear = nn.Linear(3, 3)
    model, before = nn.Sequential(linear), linear.weight.clone()
    with pytest.raises(ConfigError, match=r"Sequential names none: use init=torch, or .* residual_projections\(\)"):
        GPT2Init(0.02)(model)
    assert torch.equal(linear.weight, before)


def test_torch_changes_nothing_and_draws_nothing() -> None:
    model = gpt()
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    TorchInit()(model)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("std", [0.0, -0.02, float("nan")])
def test_a_std_that_is_not_above_zero_is_refused(std: float) -> None:
    with pytest.raises(ConfigError, match=r"init\.std=.* is not above 0: .* 0\.02"):
        GPT2Init(std)
