"""The GPT's layers against their formulas in float64, and in the dtypes that autocast hands them."""

import math

import pytest
import torch
from torch import nn

from stabletrain.models.layers import KVCache, RMSNorm, Rotary, SwiGLUMLP
from tests.models.given import meta


@pytest.mark.parametrize(("n_embd", "hidden"), [(24, 64), (128, 384), (384, 1024), (768, 2048), (1000, 2688)])
def test_swiglu_is_eight_thirds_wide_rounded_up_to_64(n_embd: int, hidden: int) -> None:
    model = meta(n_embd=n_embd, mlp="swiglu")
    assert hidden == 64 * math.ceil(8 * n_embd / 3 / 64)
    assert [model.get_parameter(f"blocks.0.mlp.{name}.weight").shape for name in ("gate", "up", "down")] == [
        (hidden, n_embd),
        (hidden, n_embd),
        (n_embd, hidden),
    ]


def test_swiglu_is_its_formula() -> None:
    mlp = SwiGLUMLP(32, bias=True).double()
    p = dict(mlp.named_parameters())
    x = torch.randn(2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, up = (x @ p[f"{name}.weight"].T + p[f"{name}.bias"] for name in ("gate", "up"))
    hidden = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(mlp(x), hidden @ p["down.weight"].T + p["down.bias"])


def test_rope_turns_each_pair_by_its_angle() -> None:
    rotary = Rotary(block_size=40, n_embd=0, head_dim=8)
    x = torch.randn(2, 10, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angle = torch.outer(
        torch.arange(30, 40, dtype=torch.float64), 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    )
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(
        rotary.rotate(x, start=30), torch.cat([turned.real, turned.imag], -1), rtol=1e-6, atol=1e-6
    )


def test_rope_depends_on_the_distance_alone() -> None:
    rotary = Rotary(block_size=1024, n_embd=0, head_dim=16)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = torch.stack([(rotary.rotate(q, start=s + 7) * rotary.rotate(k, start=s)).sum() for s in (0, 1, 50, 1016)])
    torch.testing.assert_close(score, score[:1].expand(4), rtol=1e-5, atol=1e-6)
    other = (rotary.rotate(q, start=8) * rotary.rotate(k, start=0)).sum()
    assert abs(other - score[0]) > 1e-2  # and it does depend on the distance


def test_rope_in_bf16_is_exact_up_to_one_rounding() -> None:
    rotary = Rotary(block_size=1024, n_embd=0, head_dim=16)
    x = torch.randn(1, 24, 1, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = rotary.rotate(x, start=1000)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.double(), rotary.rotate(x.double(), start=1000), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rmsnorm_is_exact_under_autocast_whatever_it_is_given(dtype: torch.dtype) -> None:
    norm = RMSNorm(64, eps=1e-6, bias=False)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    x = (100 * torch.randn(5, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    wide = x.double()
    reference = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), reference, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_cache_gives_all_keys_and_values_that_it_has_been_shown_in_their_order() -> None:
    cache, keys = KVCache(), torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    assert cache.length == 0
    for start, stop in [(0, 1), (1, 4), (4, 5)]:
        k, v = cache.extend(keys[:, :, start:stop], -keys[:, :, start:stop])
        assert cache.length == stop
        assert torch.equal(k, keys[:, :, :stop])
        assert torch.equal(v, -keys[:, :, :stop])
