"""Activation checkpointing: the bits of training without it, and less that is kept for the backward pass."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stabletrain.errors import ConfigError
from stabletrain.forensics.rerun import copy_of_model
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.parallel.fsdp import FSDP
from stabletrain.stability.activation_checkpointing import CheckpointedBlocks, SelectiveBlocks
from stabletrain.stability.qkclip import QKClip
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.monitors.watched import tiny_gpt, tiny_resnet, tokens
from tests.parallel.conftest import group_of_one  # noqa: F401
from tests.runs import TINY_GPT, TINY_RESNET, composed

KINDS = {"blocks": CheckpointedBlocks(), "selective": SelectiveBlocks()}
DEEP = ["steps=3", "check=off", "model.n_layer=2"]
RUNS = {
    "gpt": [*TINY_GPT, *DEEP, "model.dropout=0.2", "precision=bf16", "qkclip=kimi", "qkclip.max_logit=1e-3"],
    "chunks": [
        *TINY_GPT,
        *DEEP,
        "loss_chunk=7",
        "grad_accum_steps=2",
        "softmax=sink",
        "monitors=full",
        "monitors.every=1",
    ],
    "resnet": [*TINY_RESNET, "steps=3", "check=off", "model.depth=8", "precision=fp32"],
}


def states(folder, *overrides):
    """Weights and buffers after a run, and the number of its metrics."""
    with composed(*overrides, "log_every=1") as cfg:
        run = build(cfg, folder)
        train(run)
    names = {name for line in read_jsonl(folder / "metrics.jsonl") for name in line}
    return run.state.model.state_dict(), names


class Made(TorchDispatchMode):
    """Notes the memory of everything that operations make, without keeping it."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self.storages.append((StorageWeakRef(each.untyped_storage()), each.untyped_storage().nbytes()))
        return out

    def kept(self):
        """The bytes of what still exists."""
        return sum({ref.cdata: size for ref, size in self.storages if not ref.expired()}.values())


def passes(model, inputs, seed=3):
    """Runs forward and backward; returns the bytes that exist between both, and the gradients."""
    torch.manual_seed(seed)
    model.zero_grad()
    with Made() as made:
        loss = model(inputs).float().square().mean()
    kept = made.kept()
    loss.backward()
    return kept, [parameter.grad for parameter in model.parameters()]


def with_kind(kind, make):
    """A model, and the same with activation checkpointing."""
    plain = make()
    model = copy_of_model(plain)
    KINDS[kind].attach(model)
    return plain, model


def same_bits(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow(unless=lambda kind, run: (kind, run) in {("blocks", "resnet"), ("selective", "gpt")})
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_bits_of_training_without(tmp_path, kind, run):
    plain, measured = states(tmp_path / "none", *RUNS[run])
    found, measured_then = states(tmp_path / kind, *RUNS[run], f"activation_checkpointing={kind}")
    assert found.keys() == plain.keys()
    assert same_bits(found.values(), plain.values())
    assert measured_then == measured


@pytest.mark.parametrize("make", [lambda: tiny_gpt(dropout=0.2), tiny_resnet], ids=["gpt", "resnet"])
def test_less_is_kept_and_least_with_blocks(make):
    kept = {}
    for kind in KINDS:
        plain, model = with_kind(kind, make)
        inputs = torch.randn(4, plain.conv1.in_channels, 8, 8) if hasattr(plain, "conv1") else tokens().inputs
        kept["none"], expected = passes(plain, inputs)
        kept[kind], found = passes(model, inputs)
        assert same_bits(found, expected)
        assert same_bits(model.buffers(), plain.buffers()), "each batch enters the statistics once"
    assert kept["blocks"] < kept["selective"] < kept["none"]


class Counting(nn.Module):
    """A block whose output depends on a buffer that it writes, as in spectral normalisation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = []
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.calls.append(torch.is_grad_enabled())
        self.scale.mul_(1.5)
        return self.linear(x).tanh() * self.scale


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_reads_its_buffers_as_they_were_and_changes_them_once():
    plain, model = with_kind("blocks", lambda: Stack(Counting(), Counting()))
    _, expected = passes(plain, torch.ones(2, 4))
    _, found = passes(model, torch.ones(2, 4))
    assert same_bits(found, expected)
    assert [block.scale.item() for block in model.blocks] == [1.5, 1.5]
    assert [len(block.calls) for block in model.blocks] == [2, 2], "it was computed again"
    buffers = [*model.buffers()]
    torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True)), "the same tensors"


def test_a_block_reads_them_so_again_in_a_second_backward_pass():
    plain, model = with_kind("blocks", lambda: Stack(Counting()))
    losses = [each(torch.ones(2, 4)).square().mean() for each in (plain, model)]
    for _ in range(2):
        expected, found = (
            torch.autograd.grad(loss, list(each.parameters()), retain_graph=True)
            for loss, each in zip(losses, (plain, model), strict=True)
        )
        assert same_bits(found, expected)
    assert len(model.blocks[0].calls) == 3, "it was computed again each time"


@pytest.mark.parametrize("mode", ["evaluation", "no_grad"])
def test_only_a_training_pass_with_gradients_is_computed_again(mode):
    _, model = with_kind("blocks", lambda: Stack(Counting()))
    model.train(mode != "evaluation")
    with torch.set_grad_enabled(mode != "no_grad"):
        y = model(torch.ones(2, 4))
    if y.requires_grad:
        y.sum().backward()
    assert len(model.blocks[0].calls) == 1


def test_the_meter_of_qk_clip_measures_a_batch_once():
    plain, model = with_kind("selective", lambda: tiny_gpt(dropout=0.0, qkclip=QKClip(max_logit=1e-3)))
    for each in (plain, model):
        passes(each, tokens().inputs)
        QKClip(max_logit=1e-3)(each, torch.tensor(True))
    assert same_bits(model.parameters(), plain.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_names_the_operations_of_the_first_pass_and_marks_those_of_the_second(kind):
    plain, model = with_kind(kind, lambda: tiny_gpt(dropout=0.0))
    traces = []
    for each in (plain, model):
        with Trace(each) as trace:
            each(tokens().inputs).float().square().mean().backward()
        traces.append(trace)
    plain, found = (
        [(r.op, r.module) for r in t.records if r.direction == "forward" and not r.recomputed and "blocks" in r.module]
        for t in traces
    )
    its_own = ("aten.detach", "aten.empty")  # of the checkpointing itself; the second in PyTorch 2.11
    assert [each for each in found if each[0] not in its_own] == [each for each in plain if each[0] not in its_own]
    assert any(record.recomputed for record in traces[1].records)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="activation_checkpointing=selective finds no blocks in Sequential"):
        SelectiveBlocks().attach(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_blocks_give_the_bits_of_whole_ones(group_of_one, kind):  # noqa: F811
    plain, model = with_kind(kind, lambda: tiny_gpt(dropout=0.2))
    FSDP(group_of_one).shard(model)
    for _ in range(2):
        _, expected = passes(plain, tokens().inputs)
        _, found = passes(model, tokens().inputs)
        assert same_bits([each.full_tensor() for each in found], expected)
