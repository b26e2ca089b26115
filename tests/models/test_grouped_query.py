"""Grouped-query attention: full attention with repeated heads, with every other part of the attention, and Llama's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.models.sampling import generate
from stabletrain.monitors import forward
from stabletrain.stability.attention_gate import SigmoidGate
from stabletrain.stability.optimizers import Muon
from stabletrain.stability.qkclip import LogitMeter, QKClip
from stabletrain.stability.qknorm import RMSNormQK
from stabletrain.stability.softcap import Gemma2Softcap
from stabletrain.stability.softmax import SinkSoftmax
from tests.models.given import meta, small
from tests.stability.optimizers.given import MUON

SHARED = ("attention.key.weight", "attention.key.bias", "attention.value.weight", "attention.value.bias")
PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "learned positions, biases": {"position": "learned", "bias": True},
    "qknorm, softcap": {"qknorm": RMSNormQK(1e-6), "softcap": Gemma2Softcap(2.0, 3.0)},
    "sink, gate": {"softmax": SinkSoftmax(), "attention_gate": SigmoidGate("head")},
    "sink, softcap": {"softmax": SinkSoftmax(), "softcap": Gemma2Softcap(2.0, 3.0)},
}
OPEN = torch.tensor(True)


def tokens(*shape: int) -> Tensor:
    return torch.randint(29, shape, generator=torch.Generator().manual_seed(1))


def repeated(values: Tensor, heads: int, times: int) -> Tensor:
    """Rows of one head after another, each head `times` times."""
    return values.unflatten(0, (heads, -1)).repeat_interleave(times, dim=0).flatten(0, 1)


def pair(heads: int, **changes: Any) -> tuple[GPT, GPT]:
    """A GPT of 4 heads with `heads` of keys and values, and one with as many as queries, in which they are repeated."""
    shared, full = small(n_kv_head=heads, **changes).double(), small(**changes).double()
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            mine = shared.get_parameter(name)
            if name.endswith("sink"):
                mine.normal_()
            parameter.copy_(repeated(mine, heads, 4 // heads) if name.endswith(SHARED) else mine)
    return shared, full


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_it_is_full_attention_with_repeated_heads_in_logits_and_gradients(part: str, heads: int) -> None:
    shared, full = pair(heads, **PARTS[part])
    inputs = tokens(2, 9)
    torch.testing.assert_close(shared(inputs), full(inputs), rtol=1e-12, atol=1e-12)
    for model in (shared, full):
        F.cross_entropy(model(inputs).flatten(0, 1), inputs.roll(-1, 1).flatten()).backward()
    for name, parameter in full.named_parameters():
        mine, theirs = shared.get_parameter(name).grad, parameter.grad
        assert mine is not None
        assert theirs is not None
        if name.endswith(SHARED):  # a shared head has the gradients of all its copies
            theirs = theirs.unflatten(0, (heads, 4 // heads, -1)).sum(dim=1).flatten(0, 1)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_as_many_heads_as_queries_is_the_model_of_old() -> None:
    old, same = small(), small(n_kv_head=4)
    assert old.state_dict().keys() == same.state_dict().keys()
    assert all(torch.equal(same.state_dict()[name], value) for name, value in old.state_dict().items())
    assert torch.equal(old(tokens(2, 9)), same(tokens(2, 9)))


@pytest.mark.parametrize("part", ["plain", "sink, softcap"])
def test_a_cache_holds_the_few_heads_and_gives_the_logits_of_one_pass(part: str) -> None:
    model = small(n_kv_head=2, **PARTS[part])
    inputs, cache = tokens(2, 8), model.new_cache()
    pieces = [model(piece, cache) for piece in inputs.split([5, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(inputs), rtol=1e-5, atol=1e-5)
    assert [each.shape for each in cache[0]._past or ()] == [(2, 2, 8, 8)] * 2
    assert generate(model, inputs[:1, :4], 3).shape == (1, 7)


def test_a_number_that_does_not_divide_the_heads_is_refused() -> None:
    for wrong in (0, -1, 3, 8):
        with pytest.raises(ConfigError, match=rf"n_kv_head={wrong} does not divide model.n_head=4.*one of 1, 2, 4$"):
            small(n_kv_head=wrong)


def test_monitors_see_each_head_of_queries() -> None:
    shared, full = pair(2)
    found = []
    for model in (shared, full):
        with forward.recording_attention(model) as heard:
            model(tokens(2, 9))
        found.append(heard["blocks.1.attention.dot_product"])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert found[0].largest.shape == (4,)


@pytest.mark.parametrize("bias", [False, True])
def test_qk_clip_scales_the_queries_of_a_head_alone_and_its_next_logits_start_from_the_bound(bias: bool) -> None:
    clip = QKClip(1.0)
    model = small(n_kv_head=2, qkclip=clip, bias=bias).train()
    attention = model.blocks[0].attention
    with torch.no_grad():
        attention.query.weight.mul_(0.02)
        attention.query.weight[8:16] *= 5000  # head 1, which shares its keys with head 0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(tokens(3, 8))
    seen = attention.meter.max_logit.clone()
    assert seen.shape == (4,)
    assert seen[1] > 1 > seen[[0, 2, 3]].max(), "the case to test"
    clip(model, OPEN)
    model(tokens(3, 8))
    expected = torch.where(seen > 1, torch.ones(()), seen)
    torch.testing.assert_close(attention.meter.max_logit, expected, rtol=1e-4, atol=0)
    for name, parameter in attention.named_parameters():
        old = before[f"blocks.0.attention.{name}"]
        if name.startswith("query"):
            torch.testing.assert_close(parameter[8:16], old[8:16] / seen[1], rtol=1e-6, atol=0)
            parameter, old = torch.cat([parameter[:8], parameter[16:]]), torch.cat([old[:8], old[16:]])
        assert torch.equal(parameter, old), name


def test_the_meter_repeats_the_keys() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    few, many = LogitMeter(4), LogitMeter(4)
    few(q, k)
    many(q, k[:, [0, 0, 1, 1]])
    assert torch.equal(few.max_logit, many.max_logit)


def test_muon_per_head_orthogonalises_each_shared_head_alone() -> None:
    """No head feels another one's gradients: those of the first head are 1024 times as large, and change nothing."""
    found = []
    for louder in (1, 1024):
        model = small(n_kv_head=2)
        optimizer = Muon(**MUON | {"weight_decay": 0.0}, per_head=True)(model)
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        weights = [model.get_parameter(f"blocks.0.attention.{name}.weight") for name in ("query", "key", "value")]
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            assert weight.grad is not None
            weight.grad[:8] *= louder
        optimizer.step()
        found.append([old - weight.detach() for old, weight in zip(before, weights, strict=True)])
    for heads, one, other in zip((4, 2, 2), *found, strict=True):
        assert torch.equal(one, other)
        sizes = torch.linalg.svdvals(one.unflatten(0, (heads, 8)).double())
        assert sizes.max() < 2 * sizes.min()  # five Newton-Schulz iterations: 0.7 to 1.2 times the factor


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}


def test_a_published_model_of_these_layers_has_its_published_size() -> None:
    """MobileLLM-125M, arXiv 2402.14905: 30 x 576, 9 heads, 3 of keys and values, tied, 32,000 tokens: 124.6 M."""
    sizes = {"vocab_size": 32000, "block_size": 2048, "n_layer": 30, "n_head": 9, "n_kv_head": 3, "n_embd": 576}
    assert count(meta(**LLAMA, **sizes, tied_head=True)) == 124_635_456


@pytest.mark.slow
def test_the_layers_of_llama_compute_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = small(**LLAMA, n_kv_head=2, norm_eps=1e-6)
    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=32,
        intermediate_size=model.blocks[0].mlp.up.out_features,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    names = {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"}
    names |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "out": "self_attn.o_proj"}
    names |= {each: f"mlp.{each}_proj" for each in ("gate", "up", "down")}
    outside = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    outside |= {"head.weight": "lm_head.weight"}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    state = {}
    for name, parameter in model.named_parameters():
        _, number, *inner = name.split(".") if name not in outside else ("", "")
        state[outside.get(name) or f"model.layers.{number}.{names[inner[-2]]}.weight"] = parameter.detach()
    theirs.load_state_dict(state)
    assert count(theirs) == count(model)
    torch.testing.assert_close(model(tokens(2, 9)), theirs(tokens(2, 9)).logits, rtol=1e-4, atol=1e-4)
