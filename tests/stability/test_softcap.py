"""Softcap: the closed form and its slope, the cap before the mask, and the mask aligned to the end."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stabletrain.stability.softcap import Gemma2Softcap, NoSoftcap, softcap

KINDS = [NoSoftcap(), Gemma2Softcap(attention_cap=5.0, final_cap=3.0)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["none", "gemma2"])


def qkv(dtype: torch.dtype = torch.float64, scale: float = 4.0) -> tuple[Tensor, ...]:
    """Returns tensors `[2, 3, 6, 8]` whose scores are in the tens, so that a cap of 5 matters."""
    q, k, v = torch.randn(3, 2, 3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (scale * q).to(dtype), (scale * k).to(dtype), v.to(dtype)


def by_hand(q: Tensor, k: Tensor, v: Tensor, cap: float, is_causal: bool) -> Tensor:
    """Computes attention one query at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    rows = []
    for i in range(q.shape[-2]):
        seen = i + 1 + k.shape[-2] - q.shape[-2] if is_causal else k.shape[-2]
        scores = torch.einsum("bhd,bhkd->bhk", q[:, :, i], k[:, :, :seen]) / math.sqrt(q.shape[-1])
        if cap < math.inf:
            scores = cap * torch.tanh(scores / cap)
        rows.append(torch.einsum("bhk,bhkd->bhd", torch.softmax(scores, -1), v[:, :, :seen]))
    return torch.stack(rows, dim=2)


def test_softcap_is_its_formula_with_slope_one_minus_tanh_squared() -> None:
    x = torch.linspace(-200, 200, 401, dtype=torch.float64, requires_grad=True)
    y = softcap(x, 50.0)
    torch.testing.assert_close(y, torch.tensor([50 * math.tanh(v / 50) for v in x.tolist()], dtype=torch.float64))
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, 1 / torch.cosh(x.detach() / 50).square())


def test_softcap_stays_below_its_cap_and_changes_little_near_zero() -> None:
    assert softcap(torch.tensor([1e30, torch.inf, -torch.inf]), 30.0).tolist() == [30.0, 30.0, -30.0]
    x = torch.linspace(-1, 1, 21)
    assert (softcap(x, 50.0) - x).abs().max().item() < 1 / (3 * 50**2) + 1e-6  # the next term is x^3 / (3 cap^2)


def test_a_bf16_logit_four_caps_out_still_has_its_slope() -> None:
    logits = torch.tensor([120.0], dtype=torch.bfloat16, requires_grad=True)
    y = Gemma2Softcap(attention_cap=50.0, final_cap=30.0).final(logits)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert logits.grad is not None
    assert logits.grad.item() == pytest.approx(1 / math.cosh(4) ** 2, rel=2**-7)


@each_kind
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_is_its_formula(kind: Any, is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype, scale=1.0 if dtype == torch.bfloat16 else 4.0)
    y = kind.attend(q, k, v, is_causal=is_causal, dropout_p=0.0)
    assert y.dtype == dtype
    cap = getattr(kind, "attention_cap", math.inf)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(y.double(), by_hand(q, k, v, cap, is_causal), rtol=tolerance, atol=tolerance)


@each_kind
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_fewer_queries_than_keys_are_the_last_ones(kind: Any, queries: int) -> None:
    q, k, v = qkv()
    full = kind.attend(q, k, v, is_causal=True, dropout_p=0.0)
    last = kind.attend(q[:, :, -queries:], k, v, is_causal=True, dropout_p=0.0)
    torch.testing.assert_close(last, full[:, :, -queries:])


@each_kind
def test_attention_has_the_gradient_of_its_values(kind: Any) -> None:
    q, k, v = (x[:1, :1, :4].clone().requires_grad_() for x in qkv(scale=2.0))
    assert torch.autograd.gradcheck(lambda *qkv: kind.attend(*qkv, is_causal=True, dropout_p=0.0), (q, k, v))


@each_kind
def test_dropout_drops_weights_and_keeps_their_mean(kind: Any) -> None:
    torch.manual_seed(0)
    q, k = torch.zeros(2, 64, 1, 64, 4).unbind(0)
    v = torch.ones(64, 1, 64, 4)
    y = kind.attend(q, k, v, is_causal=False, dropout_p=0.25)
    kept = (y[..., 0] * 64 * 0.75).round() / 64  # share of the 64 equal weights that is left
    assert kept.mean().item() == pytest.approx(0.75, abs=5 * math.sqrt(0.25 * 0.75 / 64**3))
    assert kept.std().item() == pytest.approx(math.sqrt(0.25 * 0.75 / 64), rel=0.1)


def test_a_cap_far_above_the_scores_changes_nothing() -> None:
    capped = Gemma2Softcap(attention_cap=1e6, final_cap=1e6)
    arguments = {"is_causal": True, "dropout_p": 0.0}
    torch.testing.assert_close(capped.attend(*qkv(), **arguments), NoSoftcap().attend(*qkv(), **arguments))


def test_each_cap_acts_only_on_its_own_logits() -> None:
    kind = Gemma2Softcap(attention_cap=5.0, final_cap=3.0)
    x = torch.linspace(-20, 20, 11)
    torch.testing.assert_close(kind.final(x), 3 * torch.tanh(x / 3))


def test_none_is_pytorchs_fused_attention_bitwise() -> None:
    q, k, v = qkv(torch.float32)
    ours = NoSoftcap().attend(q, k, v, is_causal=True, dropout_p=0.0)
    assert torch.equal(ours, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert NoSoftcap().final(q) is q
