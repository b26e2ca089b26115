"""Attention sink: the closed form in float64, fp32's digits in half precision, and what it changes in a GPT."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.models.sampling import generate
from stabletrain.stability.parameter_roles import WeightDecay
from stabletrain.stability.softcap import Gemma2Softcap, NoSoftcap
from stabletrain.stability.softmax import PlainSoftmax, SinkSoftmax, with_sink_key
from tests.models.given import small

SOFTCAPS = [NoSoftcap(), Gemma2Softcap(attention_cap=5.0, final_cap=3.0)]
each_softcap = pytest.mark.parametrize("softcap", SOFTCAPS, ids=["none", "gemma2"])


def given(dtype: torch.dtype = torch.float64, scale: float = 2.0) -> tuple[Tensor, ...]:
    """Returns queries, keys and values `[2, 3, 6, 8]`, and sinks of the size of their scores."""
    q, k, v = torch.randn(3, 2, 3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (scale * q).to(dtype), (scale * k).to(dtype), v.to(dtype), torch.tensor([-1.5, 0.0, 4.0])


def by_hand(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, cap: float, is_causal: bool = True) -> Tensor:
    """Computes attention one query at a time, in float64: the sink's column is dropped after the softmax."""
    q, k, v, sink = q.double(), k.double(), v.double(), sink.double()
    rows = []
    for i in range(q.shape[-2]):
        seen = i + 1 + k.shape[-2] - q.shape[-2] if is_causal else k.shape[-2]
        scores = torch.einsum("bhd,bhkd->bhk", q[:, :, i], k[:, :, :seen]) / math.sqrt(q.shape[-1])
        if cap < math.inf:
            scores = cap * torch.tanh(scores / cap)
        total = scores.exp().sum(-1, keepdim=True) + sink.exp()[None, :, None]
        rows.append(torch.einsum("bhk,bhkd->bhd", scores.exp() / total, v[:, :, :seen]))
    return torch.stack(rows, dim=2)


def cap_of(softcap: NoSoftcap) -> float:
    return getattr(softcap, "attention_cap", math.inf)


@each_softcap
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("queries", [6, 1, 4])
def test_attention_with_a_sink_is_its_formula(softcap: Any, is_causal: bool, queries: int) -> None:
    q, k, v, sink = given()
    y = softcap.attend(q[:, :, -queries:], k, v, is_causal=is_causal, dropout_p=0.0, sink=sink)
    torch.testing.assert_close(y, by_hand(q[:, :, -queries:], k, v, sink, cap_of(softcap), is_causal))


@each_softcap
def test_the_gradients_of_all_four_are_those_of_the_formula(softcap: Any) -> None:
    each = [x.double().requires_grad_() for x in given()]
    grad = torch.randn(2, 3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = softcap.attend(*each[:3], is_causal=True, dropout_p=0.0, sink=each[3])
    found = torch.autograd.grad(y, each, grad)
    wanted = torch.autograd.grad(by_hand(*each, cap=cap_of(softcap)), each, grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert (wanted[3].abs() > 1e-3).all()


@each_softcap
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)])
def test_the_output_has_the_dtype_of_the_values(softcap: Any, dtype: torch.dtype, tolerance: float) -> None:
    q, k, v, sink = given(dtype)
    y = softcap.attend(q, k, v, is_causal=True, dropout_p=0.0, sink=sink)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), by_hand(q, k, v, sink, cap_of(softcap)), rtol=tolerance, atol=tolerance)


@each_softcap
def test_a_sink_far_below_the_scores_changes_nothing(softcap: Any) -> None:
    q, k, v, sink = given()
    plain = softcap.attend(q, k, v, is_causal=True, dropout_p=0.0)
    torch.testing.assert_close(
        softcap.attend(q, k, v, is_causal=True, dropout_p=0.0, sink=torch.full_like(sink, -1e4)), plain
    )


def test_a_sink_of_0_divides_by_one_more() -> None:
    """ "Softmax off by one": the first query sees one key, whose score is 0 here."""
    q, k, v, sink = given()
    y = NoSoftcap().attend(0 * q, k, v, is_causal=True, dropout_p=0.0, sink=0 * sink)
    torch.testing.assert_close(y, v.cumsum(dim=2) / torch.arange(2, 8)[:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_fp32s_digits_of_a_sink(dtype: torch.dtype) -> None:
    q, k, v, sink = given(dtype)
    sink = sink + torch.tensor([1e-5, 3e-5, 1e-5])
    queries, keys, _ = with_sink_key(q, k, v, sink)
    score = (queries[:, :, 1:].float() @ keys[:, :, :1].float().transpose(-2, -1)) * 8**-0.5
    assert keys.dtype == dtype
    torch.testing.assert_close(score, sink[None, :, None, None].expand_as(score), rtol=3e-7, atol=3e-8)


def test_monitors_see_queries_and_keys_without_the_sink() -> None:
    model, seen = small(softmax=SinkSoftmax()), []
    model.blocks[0].attention.dot_product.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    model(torch.arange(9).view(1, 9))
    assert [each.shape for each in seen] == [(1, 4, 9, 8)] * 3


@each_softcap
def test_a_token_changes_no_logits_before_it_and_the_cache_changes_none(softcap: Any) -> None:
    model = small(softmax=SinkSoftmax(), softcap=softcap)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.dot_product.sink.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    one, two = torch.arange(12).view(1, 12), torch.cat([torch.arange(7), torch.arange(20, 25)]).view(1, 12)
    assert torch.equal(model(one)[:, :7], model(two)[:, :7])
    assert not torch.allclose(model(one), small(softcap=softcap)(one), atol=1e-3), "the sinks matter here"
    cache = model.new_cache()
    pieces = torch.cat([model(piece, cache) for piece in one.split([5, 1, 4, 2], dim=1)], dim=1)
    torch.testing.assert_close(pieces, model(one), rtol=1e-5, atol=1e-5)
    cached = generate(model, one[:, :3], 12, temperature=0.0)
    assert torch.equal(model(cached[:, :-1])[:, 2:].argmax(-1), cached[:, 3:])


@each_softcap
def test_dropout_drops_weights_of_keys_and_keeps_their_mean(softcap: Any) -> None:
    torch.manual_seed(0)
    q, k = torch.zeros(2, 64, 1, 64, 4).unbind(0)
    y = softcap.attend(q, k, torch.ones(64, 1, 64, 4), is_causal=False, dropout_p=0.25, sink=torch.zeros(1))
    assert y.mean().item() == pytest.approx(64 / 65, abs=5 * (0.25 / 0.75 / 64**3) ** 0.5)
    assert y.std().item() > 0.01


def test_plain_adds_nothing_and_draws_no_random_number() -> None:
    assert PlainSoftmax().sink(4) is None
    torch.manual_seed(0)
    model, after = GPT(vocab_size=5, n_layer=1, softmax=PlainSoftmax()), torch.rand(1)
    torch.manual_seed(0)
    other = GPT(vocab_size=5, n_layer=1)
    assert torch.equal(torch.rand(1), after)
    assert model.state_dict().keys() == other.state_dict().keys()
    assert not [name for name in model.state_dict() if "sink" in name]


def test_sinks_are_fp32_start_at_0_learn_and_do_not_decay() -> None:
    model = small(softmax=SinkSoftmax()).train()
    sinks = [block.attention.dot_product.sink for block in model.blocks]
    assert all(sink.dtype == torch.float32 and sink.tolist() == [0.0] * 4 for sink in sinks)
    without = WeightDecay(0.1).groups(model, 1e-3)[1]["params"]
    assert all(any(each is sink for each in without) for sink in sinks)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.arange(12).view(1, 12))
    nn.functional.cross_entropy(logits[0, :-1].float(), torch.arange(1, 12)).backward()
    assert all(sink.grad is not None and sink.grad.all() for sink in sinks)


def test_a_users_softcap_that_takes_no_sink_is_refused_by_name() -> None:
    class Own(NoSoftcap):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, dropout_p: float) -> Tensor:
            raise NotImplementedError

    small(softcap=Own())
    with pytest.raises(ConfigError, match=r"Own.attend\(\) takes no sink.*fix: softmax=plain"):
        small(softcap=Own(), softmax=SinkSoftmax())
