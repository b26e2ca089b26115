"""QK-clip: the meter's values, the scaling after the update, and skipped steps."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.models.gpt import GPT
from stabletrain.stability import qkclip
from stabletrain.stability.qkclip import LogitMeter, NoQKClip, QKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.softcap import NoSoftcap
from stabletrain.step import compute, train_step
from stabletrain.trainer.build import build
from tests.runs import TINY_GPT, composed

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "block_size": 6}
OPEN, CLOSED = torch.tensor(True), torch.tensor(False)


def gpt(clip, bias=False, position="learned"):
    torch.manual_seed(0)
    kinds = {"position": position, "norm": "layernorm", "mlp": "gelu", "bias": bias, "tied_head": False, "dropout": 0.0}
    return GPT(**SHAPE, **kinds, qknorm=NoQKNorm(), softcap=NoSoftcap(), qkclip=clip)


def tokens():
    return torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(1))


def largest(q, k):
    """Returns each head's largest causal q·k / sqrt(d), computed pair by pair in float64."""
    batch, heads, time, dim = q.shape
    found = [0.0] * heads
    for b in range(batch):
        for h in range(heads):
            for i in range(time):
                for j in range(i + 1):
                    score = float(q[b, h, i].double() @ k[b, h, j].double()) / math.sqrt(dim)
                    found[h] = max(found[h], score)
    return torch.tensor(found, dtype=torch.float64)


def test_the_meter_remembers_each_heads_largest_causal_logit_over_micro_batches():
    meter = LogitMeter(2)
    torch.manual_seed(0)
    parts = [(10 * torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)) for _ in range(2)]
    for q, k in parts:
        meter(q, k)
    expected = torch.maximum(*(largest(q, k) for q, k in parts))
    torch.testing.assert_close(meter.max_logit.double(), expected, rtol=1e-6, atol=1e-6)
    meter.eval()
    meter(100 * parts[0][0], parts[0][1])
    torch.testing.assert_close(meter.max_logit.double(), expected, rtol=1e-6, atol=1e-6)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.size = max(self.size, made.numel())
        return made


@pytest.mark.parametrize("time", [16, 17, 31])
def test_scores_of_few_queries_at_once_have_the_same_maxima(monkeypatch, time):
    torch.manual_seed(0)
    q, k = 10 * torch.randn(2, 3, time, 4), torch.randn(2, 3, time, 4)
    q[0, 0, time - 1], k[0, 0, 0] = 30.0, 30.0  # the largest is the last query's with the first key
    q[0, 1, 0], k[0, 1, time - 1] = 40.0, 40.0  # a pair in the future does not count
    found, sizes = [], []
    for queries, at_once in ((128, 2**26), (4, 1)):
        monkeypatch.setattr(qkclip, "QUERY_BLOCK", queries)
        monkeypatch.setattr(qkclip, "LOGITS_AT_ONCE", at_once)
        meter = LogitMeter(3)
        with Largest() as seen:
            meter(q, k)
        found.append(meter.max_logit)
        sizes.append(seen.size)
    torch.testing.assert_close(found[0].double(), largest(q, k), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)
    assert sizes == [2 * 3 * time * time, 2 * 3 * 4 * time]


def test_the_meter_does_not_overflow_where_fp16_would():
    meter = LogitMeter(1)
    with torch.autocast("cpu", torch.float16):
        meter(torch.full((1, 1, 2, 4), 1e3).half(), torch.full((1, 1, 2, 4), 1e3).half())
    assert meter.max_logit == 2e6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_next_logits_of_a_clipped_head_start_from_the_bound_and_other_heads_keep_their_bits(bias, position):
    clip = QKClip(1.0)
    model = gpt(clip, bias, position)
    attention = model.blocks[0].attention
    with torch.no_grad():
        attention.query.weight[:4] *= 30  # head 0 only
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(tokens())
    seen = attention.meter.max_logit.clone()
    assert seen[0] > 1 > seen[1], "the case to test"
    clip(model, OPEN)
    model(tokens())
    torch.testing.assert_close(attention.meter.max_logit, torch.stack([torch.tensor(1.0), seen[1]]), rtol=1e-4, atol=0)
    for name, parameter in model.named_parameters():
        if "blocks.0.attention.query" in name or "blocks.0.attention.key" in name:
            root = (1 / seen[0]).sqrt()
            torch.testing.assert_close(parameter[:4], before[name][:4] * root, rtol=1e-6, atol=0)
            assert torch.equal(parameter[4:], before[name][4:]), name
        else:
            assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_non_finite_reaches_a_weight(bad):
    clip = QKClip(1.0)
    model = gpt(clip)
    before = [p.detach().clone() for p in model.parameters()]
    for block in model.blocks:
        block.attention.meter.max_logit.fill_(bad)
    clip(model, OPEN)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(block.attention.meter.max_logit.sum() == 0 for block in model.blocks)


def test_a_closed_gate_keeps_every_bit():
    clip = QKClip(1e-3)
    model = gpt(clip)
    before = [p.detach().clone() for p in model.parameters()]
    model(tokens())
    clip(model, CLOSED)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_no_qk_clip_has_no_buffer_and_changes_nothing():
    model = gpt(NoQKClip())
    before = [p.detach().clone() for p in model.parameters()]
    model(tokens())
    NoQKClip()(model, OPEN)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not list(model.buffers())
    assert gpt(QKClip(1.0)).state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_in_a_run_the_bound_holds_after_each_step_in_every_precision_and_with_accumulation(tmp_path, precision):
    chosen = [*TINY_GPT, "qkclip=kimi", "qkclip.max_logit=0.01", "checkpoint=off", f"precision={precision}"]
    with composed(*chosen, "init.std=0.5", "grad_accum_steps=2", "optimizer.lr=1e-5") as cfg:
        job = build(cfg, tmp_path)
    batch = job.data.batches.get(0).split(2)
    for _ in range(2):
        reading = train_step(job.state, batch, job.tools)
        assert reading.applied
    compute(job.state, batch, job.tools)  # the same batch on the clipped weights
    job.data.batches.close()
    for block in job.state.model.blocks:
        assert block.attention.meter.max_logit.max() < 0.012
    job.output.tracker.close(0)


def test_unused_heads_do_not_change_even_under_the_smallest_bound():
    model = gpt(QKClip(1.2e-38))
    before = [p.detach().clone() for p in model.parameters()]
    QKClip(1.2e-38)(model, OPEN)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
