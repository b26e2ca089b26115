"""Models loaded from run folders and checkpoints."""

import json
import shutil

import pytest
import torch
from omegaconf import OmegaConf

import stabletrain
from stabletrain.checkpoint.folder import find
from stabletrain.config.make import Choice
from stabletrain.errors import ConfigError
from stabletrain.trainer.saved import sizes_in, sizes_of
from tests.once import once
from tests.runs import ROOT, TINY_GPT, TINY_RESNET, composed

FIXTURES = ROOT / "tests" / "fixtures"
OTHERS = ["report=false", "monitors=none", "hydra.run.dir=run", "checkpoint.keep=5"]


def trained(place, *overrides):
    return stabletrain.train([*overrides, *OTHERS, f"hydra.run.dir={place}"]).folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A GPT's run folder; its text is gone."""

    def make(folder):
        text = folder.with_name("text.txt")
        text.write_text("no unsafe update ever reaches the weights. " * 200)
        typed = [*TINY_GPT, "data=text", f"data.path={text}", "model.dropout=0.5", "model.position=learned"]
        trained(folder, *typed, "steps=6", "checkpoint.every=2", "eval_every=2")
        text.unlink()

    return once(tmp_path_factory, "saved", make)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_model_is_loaded_without_its_data_in_eval_mode(run):
    drawn = torch.get_rng_state()
    model = stabletrain.load(run)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not any(module.training for module in model.modules())
    saved = find(run).load_model()
    state = model.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    tokens = torch.arange(16).reshape(1, 16)
    assert torch.equal(model(tokens), model(tokens)), "no dropout"


def test_one_checkpoint_and_the_best_one_are_loaded(run, monkeypatch):
    def weight(path, **how):
        return stabletrain.load(path, **how).state_dict()["head.weight"]

    early, last = run / "checkpoints" / "step-00000002", run / "checkpoints" / "step-00000006"
    assert torch.equal(weight(run), weight(last))
    assert not torch.equal(weight(run), weight(early))
    monkeypatch.chdir(early)
    assert torch.equal(weight("."), weight(early)), "a path is relative to the working folder"
    losses = {path: json.loads((path / "manifest.json").read_text())["val_loss"] for path in (early, last)}
    assert torch.equal(weight(run, best=True), weight(find(run, best=True).path))
    assert find(run, best=True).val_loss <= min(losses.values())


def test_what_cannot_be_loaded_is_one_error(run, tmp_path):
    with pytest.raises(ConfigError, match="holds no usable checkpoint"):
        stabletrain.load(tmp_path)
    with pytest.raises(ConfigError, match="device=tpu is not a device"):
        stabletrain.load(run, device="tpu")
    file = run / ".hydra" / "config.yaml"
    cfg = OmegaConf.load(file)
    cfg.model.n_embd = 32
    OmegaConf.save(cfg, file)
    with pytest.raises(ConfigError, match="weights do not fit stabletrain.models.gpt.GPT, which has changed"):
        stabletrain.load(run)
    file.unlink()
    with pytest.raises(ConfigError, match="the run's configuration, .*config.yaml, is missing"):
        stabletrain.load(run)
    weights = next((run / "checkpoints" / "step-00000006").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match="does not match its checksum"):
        stabletrain.load(run / "checkpoints" / "step-00000006")


def test_a_resnet_with_its_buffers_is_loaded(tmp_path):
    folder = trained(tmp_path / "run", *TINY_RESNET, "model.depth=8", "steps=2")
    model, saved = stabletrain.load(folder), find(folder).load_model()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("name", ["one_process", "fsdp", "plugin_run"])
def test_stored_runs_of_earlier_versions_are_loaded(name, tmp_path, monkeypatch):
    shutil.copytree(FIXTURES / name, tmp_path / "run")
    monkeypatch.syspath_prepend(FIXTURES / "plugin")
    monkeypatch.chdir(FIXTURES)
    saved, model = find(tmp_path / "run").load_model(), stabletrain.load(tmp_path / "run", trust=True)
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())


def test_sizes_come_from_shapes_before_the_data():
    with composed(*TINY_GPT, "model.position=learned") as cfg:
        model, data = Choice.of(cfg, "model"), Choice.of(cfg, "data")
    shapes = {"tokens.weight": (300, 16), "head.weight": (300, 16)}
    assert sizes_in(model, {}) == {}
    assert sizes_of(model, shapes, data) == {"vocab_size": 300, "block_size": 16}
    without = Choice("data", {"_target_": "stabletrain.errors.ConfigError"})  # data without any size
    with pytest.raises(ConfigError, match=r"model.vocab_size is null, and neither the weights nor the data have it"):
        sizes_of(model, {}, without)
