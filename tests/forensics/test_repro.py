"""A repro copies the model and the tools; replays do not touch the live ones."""

import json
import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.forensics.repro import Repro, load_repro, save_repro
from stabletrain.forensics.rerun import copy_of_model, is_compiled, with_loss_scale
from stabletrain.machine.compiling import compile_, undo_compile_
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch, RankPart
from stabletrain.stability import precision
from tests.forensics.given import GPT, RESNET, made, marked, one_step, replay, repro_of, ruined

CPU = torch.device("cpu")


@pytest.fixture
def repro(tools):
    """A step of a model with BatchNorm whose live buffers have changed since."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    buffers = [buffer.clone() for buffer in model.buffers()]
    model(torch.arange(12.0).view(4, 3)).sum().backward()
    batch = Batch(torch.arange(12.0).view(4, 3), torch.zeros(4, dtype=torch.int64), counted=99)
    return Repro(model, buffers, 5, batch, 2, tools, 1024.0, CPU)


def test_the_copy_has_the_weights_of_the_step_and_its_buffers_and_no_gradients(repro):
    live = [buffer.clone() for buffer in repro.model.buffers()]
    model_copy = repro.copy_model()
    assert not torch.equal(live[0], repro.buffers[0]), "the live statistics have moved"
    for buffer, before in zip(model_copy.buffers(), repro.buffers, strict=True):
        assert torch.equal(buffer, before)
    for mine, theirs in zip(model_copy.parameters(), repro.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
        assert mine.grad is None
        assert theirs.grad is not None
    for buffer, before in zip(repro.model.buffers(), live, strict=True):
        assert torch.equal(buffer, before)


def test_a_copy_is_reset_and_the_repro_is_not_modified(repro):
    before = [buffer.clone() for buffer in repro.buffers]
    model_copy = repro.copy_model()
    model_copy(repro.batch.inputs)
    assert not torch.equal(model_copy[1].running_mean, before[0])
    repro.reset_(model_copy)
    for buffer, kept, value in zip(model_copy.buffers(), repro.buffers, before, strict=True):
        assert torch.equal(buffer, value)
        assert torch.equal(kept, value)


def test_the_batch_is_cut_as_the_step_cut_it(repro):
    parts = repro.to_micro_batches(repro.batch)
    assert [part.inputs[:, 0].tolist() for part in parts] == [[0, 3], [6, 9]]
    assert {part.counted for part in parts} == {None}, "it is a whole batch"


def test_its_tools_run_alone_at_the_steps_loss_scale(repro):
    live = precision.fp16(CPU, init_scale=65536.0, growth_interval=2000, min_scale=1.0)
    tools = replace(repro.tools, precision=live, parallel=SingleProcess(Ranks(1, 2, 1, launched=True)))
    found = replace(repro, tools=tools).replay_tools()
    assert float(found.precision.loss_scale()) == 1024
    assert float(live.loss_scale()) == 65536
    assert found.parallel.ranks == Ranks()
    assert found.clipping is tools.clipping


def test_a_precision_without_a_loss_scale_stays_as_it_is():
    mode = precision.bf16(CPU)
    assert with_loss_scale(mode, 1024.0) == mode
    assert float(with_loss_scale(mode, 1024.0).loss_scale()) == 1


def test_a_replay_is_comparable_only_if_it_computes_the_same_operations(repro):
    class Several(SingleProcess):
        pass

    assert repro.comparable
    assert not replace(repro, applied=True).comparable
    assert not replace(repro, compiled=True).comparable
    assert not replace(repro, tools=replace(repro.tools, parallel=Several())).comparable
    repro.model[0].compile(backend="eager")
    assert not repro.comparable


def test_a_model_compiled_by_stabletrain_does_not_count_as_compiled_by_the_user():
    model = nn.Linear(3, 3)
    assert not is_compiled(model)
    compile_(model, (4, 3))
    assert not is_compiled(model)
    undo_compile_(model)
    model.compile(backend="eager")
    assert is_compiled(model)
    wrapped = nn.Linear(3, 3)
    wrapped._orig_mod = nn.Linear(3, 3)
    assert is_compiled(wrapped)


def test_a_copy_needs_the_buffers_of_this_model(repro):
    with pytest.raises(ValueError, match="shorter"):
        replace(repro, buffers=repro.buffers[:-1]).copy_model()


class Hoarder(nn.Module):
    """A user's module with attributes that are not parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.lock, self.kept, self.calls, self.list = threading.Lock(), None, 0, []
        self.layer.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x):
        self.calls += 1
        self.kept = self.layer(x)
        self.list.append(self.kept)
        return self.kept


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "plain"])
def test_a_copy_is_independent_whatever_its_attributes_hold(locked):
    model = Hoarder()
    if not locked:
        del model.lock
    model(torch.ones(2, 3)).sum().backward()
    gradient = model.layer.weight.grad.clone()
    model.compile(backend="eager")
    model_copy = copy_of_model(model)
    assert model_copy._compiled_call_impl is None
    assert model._compiled_call_impl is not None
    assert model_copy.layer.weight.grad is None
    with torch.no_grad():
        model_copy.layer.weight.zero_()
    model_copy(torch.ones(2, 3)).sum().backward()
    assert (model.calls, len(model.list), model_copy.calls) == (1, 1, 2)
    assert torch.equal(model.layer.weight.grad, gradient)
    assert bool((model.layer.weight != 0).all())
    assert torch.equal(model_copy.layer.weight.grad, gradient), "the hook doubles it here too"
    if locked:
        assert model_copy.lock is model.lock


def test_a_repro_keeps_its_metadata_and_the_memory_layout_of_the_batch(tmp_path):
    job = made(tmp_path / "run", *RESNET)
    batch = job.data.batches.get(0)
    batch = replace(batch, inputs=batch.inputs.repeat(1, 2, 1, 1).contiguous(memory_format=torch.channels_last))
    held, reading = [b.clone() for b in job.state.model.buffers()], None
    config = {"overrides": ["a=1"], "nan": math.nan, "$x": [1, None, True]}
    save_repro(tmp_path / "step", repro_of(job, batch, metadata=config))
    repro = load_repro(tmp_path / "step", job.state.model, job.tools)
    assert str(repro.metadata) == str(config)
    assert repro.batch.inputs.stride() == batch.inputs.stride()
    assert torch.equal(repro.batch.inputs, batch.inputs)
    assert torch.equal(repro.batch.ids, batch.ids)
    assert [*repro.batch.sources] == [*batch.sources]
    assert repro.reading is reading
    assert all(torch.equal(a, b) for a, b in zip(repro.buffers, held, strict=True))
    json.loads((tmp_path / "step" / "step.json").read_text(), parse_constant=pytest.fail)


class Own(nn.Linear):
    """A model of the user's: this file."""


def test_the_users_source_files_are_saved_with_their_hashes(tmp_path, repro):
    repro = replace(repro, model=Own(3, 2), buffers=[])
    for started, length in ((math.inf, 64), (0.0, None)):
        save_repro(tmp_path, replace(repro, metadata={} if started else {"started": started}))
        code = json.loads((tmp_path / "step.json").read_text())["code"]
        assert code[__name__]["file"] == __file__
        digest = code[__name__]["sha256"]
        assert (digest and len(digest)) == length, "it was written after the run began"


def test_a_reading_of_nan_comes_back_and_still_compares(tmp_path):
    job = ruined(made(tmp_path / "run", *GPT, "guard=skip"), "forward")
    batch = marked(job.data.batches.get(0), [1])
    computed, reading = one_step(job, batch)
    assert math.isnan(reading.loss)
    save_repro(tmp_path / "step", repro_of(job, batch, computed, reading))
    repro = load_repro(tmp_path / "step", job.state.model, job.tools)
    assert replay(repro, "same").bitwise_equal_to_reading
    assert replay(replace(repro, reading=reading._replace(loss=1.0)), "same").bitwise_equal_to_reading is False


def test_the_numbers_of_a_ranks_part_are_saved(tmp_path, repro):
    part = RankPart(1, math.nan, None, 2.5)
    save_repro(tmp_path, replace(repro, part=part))
    assert str(load_repro(tmp_path, repro.model, repro.tools).part) == str(part)


def test_another_precision_is_tried_on_a_saved_repro_with_its_own_loss_scale(tmp_path):
    job = made(tmp_path / "bf16", *GPT, "precision=bf16")
    save_repro(tmp_path / "step", repro_of(job, job.data.batches.get(0)))
    other = made(tmp_path / "fp16", *GPT, "precision=fp16", "precision.init_scale=256")
    assert load_repro(tmp_path / "step", other.state.model, other.tools).loss_scale == 256
    save_repro(tmp_path / "step", replace(repro_of(other, job.data.batches.get(0)), loss_scale=32.0))
    assert load_repro(tmp_path / "step", other.state.model, other.tools).loss_scale == 32
    assert load_repro(tmp_path / "step", job.state.model, job.tools).loss_scale == 1


@pytest.mark.parametrize("file", ["batch.safetensors", "state.safetensors", "step.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_repro_is_refused_by_name(tmp_path, file, how):
    job = made(tmp_path / "run", *GPT)
    save_repro(tmp_path / "step", repro_of(job, job.data.batches.get(0)))
    path = tmp_path / "step" / file
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:-7])
    else:
        content[0 if file == "step.json" else -1] ^= 1
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=file):
        load_repro(tmp_path / "step", job.state.model, job.tools)


ABSURD = {
    "reading": [5, {"loss": "x"}, {}],
    "step": ["x", None, -5, 65.5],
    "micro_batches": ["x", 0, 3, -1, 2**40],
    "order": [None, {"inputs": [7, 8]}, {"inputs": ["x"]}, {}],
    "loss_scale": [{}, "x", None],
    "threads": ["x", -1],
    "about": [5, {"config": 5}, {"config": {}, "choices": {"model": 5}}],
    "part": [5, {"rank": 0}],
    "sources": ["x", [5]],
    "compiled_for": [["x"]],
    "state.safetensors": [None, {}, {"parameters": 5}, {"parameters": {"a": {"$tensor": "gone"}}, "buffers": {}}],
    "state.safetensors sha256": [5, None],
    "batch.safetensors": [[], {"inputs": 5}],
}


def test_a_saved_step_with_absurd_values_is_refused_in_one_line(tmp_path):
    job = made(tmp_path / "run", *GPT)
    save_repro(tmp_path / "step", repro_of(job, job.data.batches.get(0)))
    file = tmp_path / "step" / "step.json"
    whole = json.loads(file.read_text())
    damaged = [json.dumps({**whole, key: value}) for key, values in ABSURD.items() for value in values]
    damaged += [json.dumps({name: value for name, value in whole.items() if name != key}) for key in ("step", "order")]
    for text in [*damaged, "[" * 100_000, '{"format": "1"}', "null"]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"step.json|safetensors"):
            load_repro(tmp_path / "step", job.state.model, job.tools)
    file.write_text(json.dumps(whole))
    load_repro(tmp_path / "step", job.state.model, job.tools)


def test_a_repro_of_another_model_is_refused_unless_it_only_lacks_a_part(tmp_path):
    job = made(tmp_path / "run", *GPT)
    save_repro(tmp_path / "step", repro_of(job, job.data.batches.get(0)))
    wider = made(tmp_path / "wider", *GPT, "model.n_embd=32")
    with pytest.raises(ConfigError, match="'embedding.weight' is .* in the incident and .*: use the model options"):
        load_repro(tmp_path / "step", wider.state.model, wider.tools)
    normed = made(tmp_path / "normed", *GPT, "qknorm=layernorm")
    with pytest.raises(ConfigError, match="is absent in the incident"):
        load_repro(tmp_path / "step", normed.state.model, normed.tools)
    repro = load_repro(tmp_path / "step", normed.state.model, normed.tools, strict=False)
    assert torch.equal(normed.state.model.head.weight, job.state.model.head.weight)
    assert replay(repro, "same").finite
