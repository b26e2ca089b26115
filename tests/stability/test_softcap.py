"""Softcap: the closed form and its slope, the cap before the mask, and the mask aligned to the end.

FlexAttention refuses gradients on a CPU, because it has no kernel for them there. Its own reference computes them.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.machine.compiling import inductor
from stabletrain.stability import flex_softcap
from stabletrain.stability import softcap as softcap_file
from stabletrain.stability.softcap import Gemma2Softcap, NoSoftcap, softcap
from tests.devices import CARD

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


FLEX = Gemma2Softcap(attention_cap=5.0, final_cap=3.0, attention="flex")


def with_gradients(attend: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the output of an attention, and the gradients of queries, keys and values."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    y = attend(*leaves)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_flex_attention_has_the_values_and_gradients_of_the_stored_scores(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *inputs: None)
    reference = with_gradients(lambda *qkv: KINDS[1].attend(*qkv, is_causal=True, dropout_p=0.0), qkv())
    math_path = with_gradients(lambda *qkv: KINDS[1].attend(*qkv, is_causal=True, dropout_p=0.0), qkv(dtype))
    fused = with_gradients(lambda *qkv: flex_softcap.attend(*qkv, 5.0), qkv(dtype))
    for ours, stored, exact in zip(fused, math_path, reference, strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - exact).abs().max()
        assert error <= {torch.float64: 1e-13, torch.float32: 4e-6}[dtype] * exact.abs().max()
        assert error <= 4 * (stored.double() - exact).abs().max() + 1e-13


def test_flex_serves_causal_training_in_compiled_code_for_a_card_only(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(torch.float32)
    stored = KINDS[1].attend(q, k, v, is_causal=True, dropout_p=0.0)
    assert torch.equal(FLEX.attend(q, k, v, is_causal=True, dropout_p=0.0), stored), "an eager pass"
    monkeypatch.setattr(flex_softcap, "attend", lambda q, k, v, cap: torch.full_like(v, cap))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(FLEX.attend(q, k, v, is_causal=True, dropout_p=0.0), stored), "code for a CPU"
    monkeypatch.setattr(softcap_file, "in_code_for_a_card", lambda q: True)
    assert FLEX.attend(q, k, v, is_causal=True, dropout_p=0.0).unique().tolist() == [5.0]
    assert torch.equal(KINDS[1].attend(q, k, v, is_causal=True, dropout_p=0.0), stored), "attention=math"
    assert FLEX.attend(q, k, v, is_causal=False, dropout_p=0.0).unique().numel() > 1
    assert FLEX.attend(q[:, :, -2:], k, v, is_causal=True, dropout_p=0.0).unique().numel() > 1, "with a KV cache"
    assert FLEX.attend(q, k, v, is_causal=True, dropout_p=0.5).unique().numel() > 1


def test_flex_is_refused_where_it_has_no_backward_pass() -> None:
    FLEX.check_device(torch.device("cuda"))
    for kind in KINDS:
        kind.check_device(torch.device("cpu"))
    with pytest.raises(ConfigError, match="attention=flex needs a card.*; fix: softcap.attention=math"):
        FLEX.check_device(torch.device("cpu"))
    with pytest.raises(ConfigError, match="attention=sdpa is unknown: choose math or flex"):
        Gemma2Softcap(attention_cap=5.0, final_cap=3.0, attention="sdpa")


@pytest.mark.parametrize("device", [CARD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_on_a_card_is_near_the_stored_scores_and_repeats_bit_for_bit(device: str, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(0)
    inputs = tuple(2 * torch.randn(2, 3, 300, 64, generator=drawn) for _ in range(3))
    code = torch.compile(flex_softcap.attend, backend=inductor, dynamic=False)
    once, again = (
        with_gradients(lambda *qkv: code(*qkv, 5.0), tuple(each.to(device, dtype) for each in inputs)) for _ in range(2)
    )
    wide = tuple(each.to(device, dtype).double() for each in inputs)
    exact = with_gradients(lambda *qkv: KINDS[1].attend(*qkv, is_causal=True, dropout_p=0.0), wide)
    for ours, same, reference in zip(once, again, exact, strict=True):
        assert torch.equal(ours, same)
        error = (ours.double() - reference).abs().max() / reference.abs().max()
        assert error <= {torch.float32: 1e-4, torch.bfloat16: 0.03}[dtype]
