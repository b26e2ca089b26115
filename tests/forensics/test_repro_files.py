"""A step in a folder: what it keeps, how it comes back, and which folders are refused."""

import json
import math
from dataclasses import replace

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.forensics.replay import replay
from stabletrain.forensics.repro_files import about, load_repro, save_repro
from tests.forensics.given import GPT, RESNET, made, marked, one_step, ruined, scene_of


def test_a_scene_keeps_what_is_said_about_it_and_how_the_batch_lay_in_memory(tmp_path):
    job = made(tmp_path / "run", *RESNET)
    batch = job.data.batches.get(0)
    batch = replace(batch, inputs=batch.inputs.repeat(1, 2, 1, 1).contiguous(memory_format=torch.channels_last))
    held, reading = [b.clone() for b in job.state.model.buffers()], None
    config = {"overrides": ["a=1"], "nan": math.nan, "$x": [1, None, True]}
    save_repro(tmp_path / "scene", scene_of(job, batch, metadata=config))
    assert str(about(tmp_path / "scene")) == str(config)
    repro = load_repro(tmp_path / "scene", job.state.model, job.tools)
    assert repro.batch.inputs.stride() == batch.inputs.stride()
    assert torch.equal(repro.batch.inputs, batch.inputs)
    assert torch.equal(repro.batch.ids, batch.ids)
    assert [*repro.batch.sources] == [*batch.sources]
    assert repro.reading is reading
    assert all(torch.equal(a, b) for a, b in zip(repro.buffers, held, strict=True))
    json.loads((tmp_path / "scene" / "scene.json").read_text(), parse_constant=pytest.fail)


def test_a_reading_of_nan_comes_back_and_still_compares(tmp_path):
    job = ruined(made(tmp_path / "run", *GPT, "guard=skip"), "forward")
    batch = marked(job.data.batches.get(0), [1])
    computed, reading = one_step(job, batch)
    assert math.isnan(reading.loss)
    save_repro(tmp_path / "scene", scene_of(job, batch, computed, reading))
    repro = load_repro(tmp_path / "scene", job.state.model, job.tools)
    assert replay(repro, "same").bitwise_equal_to_reading
    assert replay(replace(repro, reading=reading._replace(loss=1.0)), "same").bitwise_equal_to_reading is False


def test_another_precision_is_tried_on_a_saved_scene_with_its_own_loss_scale(tmp_path):
    job = made(tmp_path / "bf16", *GPT, "precision=bf16")
    save_repro(tmp_path / "scene", scene_of(job, job.data.batches.get(0)))
    other = made(tmp_path / "fp16", *GPT, "precision=fp16", "precision.init_scale=256")
    assert load_repro(tmp_path / "scene", other.state.model, other.tools).loss_scale == 256
    save_repro(tmp_path / "scene", replace(scene_of(other, job.data.batches.get(0)), loss_scale=32.0))
    assert load_repro(tmp_path / "scene", other.state.model, other.tools).loss_scale == 32
    assert load_repro(tmp_path / "scene", job.state.model, job.tools).loss_scale == 1


@pytest.mark.parametrize("file", ["batch.safetensors", "state.safetensors", "scene.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_scene_is_refused_by_name(tmp_path, file, how):
    job = made(tmp_path / "run", *GPT)
    save_repro(tmp_path / "scene", scene_of(job, job.data.batches.get(0)))
    path = tmp_path / "scene" / file
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:-7])
    else:
        content[0 if file == "scene.json" else -1] ^= 1
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=file):
        load_repro(tmp_path / "scene", job.state.model, job.tools)


def test_a_scene_of_another_model_is_refused_unless_it_only_lacks_a_part(tmp_path):
    job = made(tmp_path / "run", *GPT)
    save_repro(tmp_path / "scene", scene_of(job, job.data.batches.get(0)))
    wider = made(tmp_path / "wider", *GPT, "model.n_embd=32")
    with pytest.raises(ConfigError, match="'embedding.weight' is .* in the incident and .* in the model: replay it"):
        load_repro(tmp_path / "scene", wider.state.model, wider.tools)
    normed = made(tmp_path / "normed", *GPT, "qknorm=layernorm")
    with pytest.raises(ConfigError, match="is absent in the incident"):
        load_repro(tmp_path / "scene", normed.state.model, normed.tools)
    repro = load_repro(tmp_path / "scene", normed.state.model, normed.tools, strict=False)
    assert torch.equal(normed.state.model.head.weight, job.state.model.head.weight)
    assert replay(repro, "same").finite
