"""Activations of known layers, removal of hooks, attention statistics against float64, and log Z of known logits."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stabletrain.models.layers import RMSNorm
from stabletrain.monitors import forward
from stabletrain.monitors.forward import attention_stats, headroom, log_z, recording_activations, recording_norms
from stabletrain.records import IGNORE_INDEX
from stabletrain.stability.softcap import Gemma2Softcap, NoSoftcap
from tests.monitors.watched import tiny_gpt, tokens


class Scale(nn.Module):
    """`x * factor`, through a layer inside that gives ten times that."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.inside = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.inside.weight.copy_(10 * factor * torch.eye(2))

    def forward(self, x):
        return {"loss": None, "x": self.inside(x) / 10}


class Chain(nn.Module):
    def __init__(self, *factors):
        super().__init__()
        self.blocks = nn.ModuleList(Scale(factor) for factor in factors)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)["x"]
        return x


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_sizes_of_known_layers():
    model = Chain(2.0, 0.5, 3.0)
    with recording_activations(dict(model.blocks.named_children())) as heard:
        model(torch.tensor([[3.0, -4.0]]))
    rms = math.sqrt(12.5)
    assert {k: v.item() for k, v in heard.rms.items()} == pytest.approx({"0": 2 * rms, "1": rms, "2": 3 * rms})
    assert {k: v.item() for k, v in heard.absmax.items()} == pytest.approx({"0": 80.0, "1": 40.0, "2": 120.0})


def test_half_precision_is_measured_in_fp32():
    layer = nn.Identity()
    with recording_activations({"0": layer}) as heard:
        layer(torch.full((4, 1000), 60000.0, dtype=torch.float16))
    assert heard.rms["0"].item() == pytest.approx(60000, rel=1e-3)
    assert heard.rms["0"].dtype == torch.float32


def test_nothing_that_is_not_finite_is_hidden():
    layer = nn.Identity()
    for bad in (math.nan, math.inf):
        with recording_activations({"0": layer}) as heard:
            layer(torch.tensor([1.0, bad, 2.0]))
        assert not math.isfinite(heard.absmax["0"].item())
        assert not math.isfinite(heard.rms["0"].item())


def test_integers_and_empty_tensors_have_no_size():
    layer = nn.Identity()
    with recording_activations({"0": layer}) as heard:
        layer(torch.arange(3))
        layer((torch.zeros(0), None))
    assert heard == ({}, {})


def test_hooks_are_removed_even_if_the_pass_fails():
    model = Chain(1.0)
    with recording_activations(dict(model.named_children())):
        assert hooks(model) == 3
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 3))
    with pytest.raises(RuntimeError), recording_activations(dict(model.named_children())):
        model(torch.zeros(1, 3))
    assert hooks(model) == 0


def test_headroom():
    assert headroom(65504.0) == 0.0
    assert headroom(65504.0 / 8) == 3.0
    assert headroom(65504.0 * 4) == -2.0
    assert (headroom(0.0), headroom(math.inf)) == (math.inf, -math.inf)
    assert math.isnan(headroom(math.nan))


def random_qk(scale=1.0, samples=4, heads=3, queries=7, keys=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = scale * torch.randn(samples, heads, queries, 8, generator=generator)
    return q, scale * torch.randn(samples, heads, keys, 8, generator=generator)


def reference(q, k, causal, cap=None, heads=slice(None), rows=slice(None)):
    """The three by their definitions, in float64, with the whole matrix; entropy of the given heads and rows."""
    q, k = q.double(), k.double()
    raw = q @ k.mT / math.sqrt(q.shape[-1])
    scores = raw if cap is None else cap * torch.tanh(raw / cap)
    if causal:
        hidden = torch.ones(raw.shape[-2:], dtype=torch.bool).triu(1 + raw.shape[-1] - raw.shape[-2])
        raw, scores = raw.masked_fill(hidden, -torch.inf), scores.masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1)
    entropy = torch.special.entr(p).sum(-1)[:4, heads][:, :, rows].mean((0, 2))
    bound = q.norm(dim=-1).amax((0, 2)) * k.norm(dim=-1).amax((0, 2)) / math.sqrt(q.shape[-1])
    return bound, raw.amax((0, 2, 3)), entropy


@pytest.mark.parametrize("at_once", [1, 2 * 7, 5 * 49, 2**24])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 7)])
def test_against_float64(monkeypatch, queries, keys, causal, cap, at_once):
    monkeypatch.setattr(forward, "SCORES", at_once)
    q, k = random_qk(scale=2.0, queries=queries, keys=keys)
    for ours, exact in zip(attention_stats(q, k, causal=causal, cap=cap), reference(q, k, causal, cap), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_the_entropy_of_large_attention_is_that_of_some_heads_and_queries(monkeypatch, causal):
    monkeypatch.setattr(forward, "SCORES", 1000)
    q, k = random_qk(scale=2.0, samples=6, heads=10, queries=128, keys=130)
    q[5, 8, 0], k[5, 8, 1] = 100.0, 100.0  # a sample, a head and a row that the entropy leaves out
    found = attention_stats(q, k, causal=causal)
    assert found.largest[8].item() == pytest.approx(8e4 / math.sqrt(8))
    exact = reference(q, k, causal, heads=[1, 4, 6, 9], rows=slice(1, None, 2))
    for ours, value in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), value, rtol=1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that an operation returned."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor))])
        return out


def test_no_tensor_holds_the_logits_of_a_whole_sample(monkeypatch):
    monkeypatch.setattr(forward, "SCORES", 2000)
    q, k = torch.ones(2, 4, 128, 1), torch.ones(2, 2, 128, 1)
    with LargestTensor() as seen:
        attention_stats(q, k, causal=True, cap=2.0)
    assert q.numel() < seen.size <= 2000 < 128 * 128


def test_entropy_of_uniform_attention():
    q, k = random_qk()
    found = attention_stats(torch.zeros_like(q), k, causal=True)
    expected = sum(math.log(t + 1) for t in range(7)) / 7
    torch.testing.assert_close(found.entropy, torch.full((3,), expected))
    torch.testing.assert_close(attention_stats(q * 0, k, causal=False).entropy, torch.full((3,), math.log(7)))


def test_huge_logits_have_no_entropy_and_no_nan():
    q = torch.eye(4)[None, None] * 1e4
    found = attention_stats(q, q, causal=True)
    assert found.largest.item() == pytest.approx(1e8 / 2)
    assert 0 <= found.entropy.item() < 1e-6


def test_the_bound_is_met_by_parallel_vectors_and_by_no_others():
    q, k = torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[0.6, 0.8]]]])
    found = attention_stats(q, k, causal=True)
    assert found.bound.item() == pytest.approx(5 / math.sqrt(2))
    assert found.largest.item() == pytest.approx(5 / math.sqrt(2))
    turned = attention_stats(q, torch.tensor([[[[-0.8, 0.6]]]]), causal=True)
    assert turned.bound.item() == pytest.approx(5 / math.sqrt(2))
    assert turned.largest.item() == pytest.approx(0.0, abs=1e-6)


def test_the_future_is_not_seen():
    q = torch.ones(1, 1, 2, 1)
    k = torch.tensor([1.0, 100.0]).view(1, 1, 2, 1)
    q[0, 0, 1] = 0.0
    assert attention_stats(q, k, causal=True).largest.item() == 1.0
    assert attention_stats(q, k, causal=False).largest.item() == 100.0


def test_shared_keys():
    q, k = random_qk(heads=4)
    k = k[:, :2]
    shared, repeated = attention_stats(q, k, causal=True), attention_stats(q, k[:, [0, 0, 1, 1]], causal=True)
    assert all(torch.equal(a, b) for a, b in zip(shared, repeated, strict=True))


@pytest.mark.parametrize("softcap", [NoSoftcap(), Gemma2Softcap(0.5, 30.0)])
def test_the_attention_of_a_model_is_recorded(softcap):
    model, batch = tiny_gpt(softcap=softcap, dropout=0.0), tokens()
    seen = []
    handle = model.blocks[1].attention.dot_product.register_forward_pre_hook(lambda module, args: seen.append(args))
    with forward.recording_attention(model) as heard:
        model(batch.inputs)
    handle.remove()
    assert [*heard] == ["blocks.0.attention.dot_product", "blocks.1.attention.dot_product"]
    q, k, _ = seen[0]
    cap = getattr(softcap, "attention_cap", None)
    for ours, exact in zip(heard["blocks.1.attention.dot_product"], reference(q, k, True, cap), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
    assert forward.block_names(heard, {"blocks.0": model, "blocks.1": model}) == {
        "blocks.0.attention.dot_product": "blocks.0",
        "blocks.1.attention.dot_product": "blocks.1",
    }
    both = ["a.0.self_dot_product", "a.0.cross_dot_product"]
    assert forward.block_names(both, {"a.0": nn.Identity()}) == {name: name for name in both}


def mean_square(x):
    return x.square().mean(-1).amin()


def variance(x):
    return x.var(-1, correction=0).amin()


@pytest.mark.parametrize(
    ("norm", "shape", "expected"),
    [
        (nn.LayerNorm(6, eps=1e-3), (4, 5, 6), variance),
        (nn.LayerNorm((5, 6), eps=1e-3), (4, 5, 6), lambda x: variance(x.reshape(4, 30))),
        (RMSNorm(6, 1e-3, bias=False), (4, 5, 6), mean_square),
        (nn.BatchNorm2d(3, eps=1e-3), (4, 3, 5, 5), lambda x: variance(x.permute(1, 0, 2, 3).reshape(3, 100))),
        (nn.GroupNorm(2, 6, eps=1e-3), (4, 6, 5, 5), lambda x: variance(x.reshape(4, 2, 75))),
        (nn.InstanceNorm2d(3, eps=1e-3), (4, 3, 5, 5), lambda x: variance(x.reshape(4, 3, 25))),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_variance_by_which_a_norm_divides(norm, shape, expected):
    generator = torch.Generator().manual_seed(0)
    x = 2 + torch.randn(shape, generator=generator) * torch.rand(shape[-1:], generator=generator)
    block = nn.Sequential(nn.Identity(), norm)
    with recording_norms({"0": block}) as heard:
        block(x)
        block(x * 10)  # the smallest of several calls counts
    assert heard["0"].item() == pytest.approx(expected(x.double()).item() / 1e-3, rel=1e-4)
    assert hooks(block) == 0


@pytest.mark.parametrize("values", [1, 10, 2**24])
def test_known_logits_in_parts_of_any_size(monkeypatch, values):
    monkeypatch.setattr(forward, "VALUES", values)
    made = torch.full((2, 3, 4), -7.0)
    made[0, 1] = 5.0
    mean, largest = log_z(made, torch.zeros(2, 3, dtype=torch.int64))
    assert largest.item() == pytest.approx(5 + math.log(4))
    assert mean.item() == pytest.approx(-5 + math.log(4))


def test_ignored_targets_are_left_out():
    made = torch.tensor([[1.0, 1.0], [900.0, 900.0], [3.0, 3.0]])
    mean, largest = log_z(made, torch.tensor([0, IGNORE_INDEX, 1]))
    assert mean.item() == pytest.approx(2 + math.log(2))
    assert largest.item() == pytest.approx(3 + math.log(2))


def test_bf16_logits_are_summed_in_fp32():
    made = torch.zeros(1, 1000, dtype=torch.bfloat16)
    mean, _ = log_z(made, torch.zeros(1, dtype=torch.int64))
    assert mean.item() == pytest.approx(math.log(1000), rel=1e-6)
