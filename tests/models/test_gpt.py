"""The GPT: causal, as large as its papers say, the same with a cache, and correct in every dtype autocast hands it."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.models.gpt import GPT
from stabletrain.stability.init import GPT2Init
from stabletrain.stability.qknorm import LayerNormQK, RMSNormQK
from stabletrain.stability.softcap import Gemma2Softcap, NoSoftcap
from tests.models.given import meta, small

SOFTCAPS = [NoSoftcap(), Gemma2Softcap(attention_cap=2.0, final_cap=3.0)]
GPT2_SMALL = {
    "vocab_size": 50257,
    "block_size": 1024,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "position": "learned",
    "norm_eps": 1e-5,
    "bias": True,
    "tied_head": True,
}


def tokens(*shape: int, vocab: int = 29) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_gpt2_small_has_its_published_size() -> None:
    model = meta(**GPT2_SMALL)
    assert count(model) == 124_439_808
    names = [name for name, value in model.state_dict().items() if value.shape == (50257, 768)]
    assert names == ["embedding.weight"]  # tied, so it is there once


def test_an_untied_head_adds_one_matrix_and_no_bias() -> None:
    assert count(meta(**GPT2_SMALL | {"tied_head": False})) == 124_439_808 + 50257 * 768


@pytest.mark.parametrize("bias", [True, False])
def test_bias_decides_whether_there_is_any(bias: bool) -> None:
    for mlp in ("gelu", "swiglu"):
        biases = [name for name, _ in meta(bias=bias, mlp=mlp).named_parameters() if name.endswith("bias")]
        assert bool(biases) is bias
        assert "head.bias" not in biases


def test_nothing_but_parameters_is_in_the_state_dict() -> None:
    model = small()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("softcap", SOFTCAPS, ids=["none", "gemma2"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_token_never_changes_the_logits_before_it(position: str, softcap: Any) -> None:
    model = small(position=position, softcap=softcap, qknorm=LayerNormQK(1e-6))
    inputs = tokens(1, 12)
    before = model(inputs)
    for t in range(12):
        changed = inputs.clone()
        changed[0, t] = (changed[0, t] + 1) % 29
        after = model(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(dim=-1).all()  # and it does reach every later one


@pytest.mark.parametrize("softcap", SOFTCAPS, ids=["none", "gemma2"])
@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("sizes", [[5, 1, 1, 1], [1, 4, 3], [8]], ids=str)
def test_reading_in_pieces_through_the_cache_gives_the_logits_of_one_pass(
    sizes: list[int], position: str, softcap: Any
) -> None:
    model = small(position=position, softcap=softcap, qknorm=RMSNormQK(1e-6))
    inputs, cache = tokens(2, 8), model.new_cache()
    pieces = [model(piece, cache) for piece in inputs.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(inputs), rtol=1e-5, atol=1e-5)


def test_the_model_is_the_formula() -> None:
    """One block, written out with float64 matrices."""
    model = small(n_layer=1, bias=True, position="learned", tied_head=True).double()
    p = dict(model.named_parameters())
    inputs = tokens(3, 7)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return unit * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x = p["embedding.weight"][inputs] + p["position.embedding.weight"][:7]
    y = norm(x, "blocks.0.attention_norm")
    q, k, v = (linear(y, f"blocks.0.attention.{name}").view(3, 7, 4, 8) for name in ("query", "key", "value"))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
    scores = scores + torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(3, 7, 32)
    x = x + linear(mixed, "blocks.0.attention.out")
    y = linear(norm(x, "blocks.0.mlp_norm"), "blocks.0.mlp.up")
    x = x + linear(y * 0.5 * (1 + torch.erf(y / math.sqrt(2))), "blocks.0.mlp.down")
    torch.testing.assert_close(model(inputs), norm(x, "norm") @ p["embedding.weight"].T)


def test_the_final_cap_is_applied_to_the_logits_and_the_attention_cap_is_not() -> None:
    for tied_head in (True, False):
        plain = small(tied_head=tied_head)(tokens(2, 8))
        capped = small(tied_head=tied_head, softcap=Gemma2Softcap(1e6, 3.0))(tokens(2, 8))
        assert plain.abs().max() > 3
        torch.testing.assert_close(capped, 3 * torch.tanh(plain / 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("softcap", SOFTCAPS, ids=["none", "gemma2"])
@pytest.mark.parametrize("tied_head", [True, False])
def test_under_bf16_autocast_the_logits_are_those_of_fp32_up_to_rounding(
    norm: str, softcap: Any, tied_head: bool
) -> None:
    model = small(norm=norm, softcap=softcap, tied_head=tied_head, mlp="swiglu", qknorm=RMSNormQK(1e-6))
    inputs = tokens(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, 1).float(), inputs.flatten()).backward()
    assert logits.dtype == torch.bfloat16
    exact = model(inputs)
    assert ((logits.float() - exact).norm() / exact.norm()).item() < 0.05
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("qknorm", [LayerNormQK(1e-6), RMSNormQK(1e-6)], ids=["layernorm", "rmsnorm"])
def test_qknorm_bounds_the_attention_scores_by_sqrt_d_under_bf16_autocast(qknorm: Any) -> None:
    bound = math.sqrt(8) * (1 + 2**-7) ** 2  # bf16 rounds each vector

    def largest_score(model: GPT) -> float:
        seen: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith(("query_norm", "key_norm")):
                module.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out}))
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            for name, parameter in model.named_parameters():  # grown as in a run at too high a learning rate
                if name.endswith(("query.weight", "key.weight")):
                    parameter.mul_(1e4)
            model(tokens(2, 16))
        scores = []
        for i in range(len(model.blocks)):
            q, k = (model.position.rotate(seen[f"blocks.{i}.attention.{n}_norm"], 0).double() for n in ("query", "key"))
            assert q.dtype == k.dtype == torch.float64
            scores.append((torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)).abs().max().item())
        return max(scores)

    assert largest_score(small(qknorm=qknorm)) <= bound
    assert largest_score(small()) > 1e6 * bound


@pytest.mark.parametrize("changes", [{}, {"mlp": "swiglu", "norm": "rmsnorm"}, GPT2_SMALL | {"vocab_size": 512}])
def test_a_fresh_gpt_is_at_chance(changes: dict[str, Any]) -> None:
    changes = {"vocab_size": 512} | changes | {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
    model = small(**changes)
    GPT2Init(std=0.02)(model)
    inputs = tokens(8, 65, vocab=512)
    loss = F.cross_entropy(model(inputs[:, :-1]).flatten(0, 1), inputs[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(512), abs=0.1)


@pytest.mark.parametrize("softcap", SOFTCAPS, ids=["none", "gemma2"])
@pytest.mark.parametrize("site", ["embedding", "attention weights", "attention branch", "mlp branch"])
def test_dropout_acts_at_each_of_its_sites_in_training_only(site: str, softcap: Any) -> None:
    changes = {"n_layer": 1, "softcap": softcap}
    model, plain = small(dropout=0.5, **changes), small(**changes)
    for gpt in (model, plain):  # a branch that is zero shows no dropout
        silent = {"mlp branch": ["attention.out"], "attention branch": ["mlp.down"]}.get(site, [])
        for name in silent:
            nn.init.zeros_(gpt.get_parameter(f"blocks.0.{name}.weight"))
    inputs = tokens(1, 8)
    assert torch.equal(model(inputs), plain(inputs))
    active = {"embedding": "dropout", "attention weights": "blocks.0.attention.dot_product"}.get(
        site, "blocks.0.dropout"
    )
    model.get_submodule(active).training = True
    assert not torch.equal(model(inputs), plain(inputs))
    assert not torch.equal(model(inputs), model(inputs))


COMPILES = """
import torch
from stabletrain.models.gpt import GPT
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import LayerNormQK
from stabletrain.stability.softcap import Gemma2Softcap, NoSoftcap

for position, norm, mlp, softcap in (
    ("rope", "rmsnorm", "swiglu", NoSoftcap()),
    ("learned", "layernorm", "gelu", Gemma2Softcap(5.0, 3.0)),
):
    model = GPT(
        vocab_size=29, block_size=16, n_layer=2, n_head=4, n_embd=32, position=position, norm=norm, mlp=mlp,
        bias=False, tied_head=False, dropout=0.0, qknorm=LayerNormQK(1e-6), softcap=softcap,
        qkclip=NoQKClip(),
    )
    inputs = torch.randint(29, (2, 8))
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(inputs), model(inputs))
print("compiled")
"""


@pytest.mark.slow
def test_the_model_compiles_into_one_graph() -> None:
    """In a process of its own, because the shape checks of the tests cannot be traced."""
    run = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, check=False)
    assert run.stdout == "compiled\n", run.stderr


def test_residual_projections_end_every_branch() -> None:
    """With all of them at zero, the blocks add nothing to the stream."""
    for mlp in ("gelu", "swiglu"):
        model = small(mlp=mlp, position="learned")
        assert len(model.residual_projections()) == 2 * model.n_layer
        for linear in model.residual_projections():
            nn.init.zeros_(linear.weight)
        inputs = tokens(1, 8)
        stream = model.position(model.embedding(inputs), 0)
        assert torch.equal(model(inputs), F.linear(model.norm(stream), model.get_parameter("head.weight")))


@pytest.mark.parametrize("cached", [0, 10])
def test_a_sequence_longer_than_the_block_is_refused(cached: int) -> None:
    model, cache = small(), None
    model(tokens(1, 16))
    if cached:
        cache = model.new_cache()
        model(tokens(1, cached), cache)
    with pytest.raises(ValueError, match=r"a sequence of 17 tokens is longer than model\.block_size=16"):
        model(tokens(1, 17 - cached), cache)


def test_an_odd_head_is_fine_with_learned_positions() -> None:
    assert small(n_embd=20, n_head=4, position="learned")(tokens(1, 4)).shape == (1, 4, 29)


def test_the_embeddings_gradient_is_shrunk_and_nothing_else_changes():
    whole, shrunk = small(tied_head=True), small(tied_head=True, embedding_gradient=0.1)
    for model in (whole, shrunk):
        F.cross_entropy(model(tokens(2, 8)).flatten(0, 1), tokens(2, 8).flatten()).backward()
    assert torch.equal(shrunk(tokens(2, 8)), whole(tokens(2, 8)))
    for (name, a), (_, b) in zip(shrunk.named_parameters(), whole.named_parameters(), strict=True):
        if name != "embedding.weight":
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)
    untied_whole, untied = small(), small(embedding_gradient=0.1)
    for model in (untied_whole, untied):
        F.cross_entropy(model(tokens(2, 8)).flatten(0, 1), tokens(2, 8).flatten()).backward()
    torch.testing.assert_close(
        untied.embedding.weight.grad, 0.1 * untied_whole.embedding.weight.grad, rtol=1e-4, atol=1e-8
    )
    # A tied head keeps its own gradient: what is taken away is nine tenths of the embedding's.
    as_embedding = (whole.embedding.weight.grad - shrunk.embedding.weight.grad) / 0.9
    assert 0 < as_embedding.norm() < whole.embedding.weight.grad.norm() * 10
    assert not torch.allclose(shrunk.embedding.weight.grad, 0.1 * whole.embedding.weight.grad)


def test_the_classifier_is_the_head_or_the_embedding_it_is_tied_to():
    untied, tied = small(), small(tied_head=True)
    assert untied.classifier() is untied.head
    assert tied.classifier() is tied.embedding
