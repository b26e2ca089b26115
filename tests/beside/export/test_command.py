"""`stabletrain export`: runs of every kind through the command, and the lines that it prints."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import stabletrain
from stabletrain.beside.export.command import reads, tokenizer_of
from stabletrain.beside.export.to_safetensors import Safetensors
from stabletrain.cli.commands import main
from stabletrain.config.make import Choice
from stabletrain.config.recorded import read_config
from stabletrain.stored.trusted import accepting
from tests.runs import ROOT, TINY_GPT, composed, python
from tests.weights.given import same

FIXTURES = ROOT / "tests" / "fixtures"
OTHERS = ["report=false", "monitors=none", "forensics=off", "device=cpu", "wandb=disabled", "eval_batches=1"]
GPT2 = [*TINY_GPT, "model=gpt2", "data=text", "steps=3", "checkpoint.every=2", *OTHERS]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A copy of some recorded runs as the working folder."""
    for name in ("one_process", "fsdp", "plugin", "plugin_run"):
        shutil.copytree(FIXTURES / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "plugin"))
    with accepting():
        read_config(Path("plugin_run/.hydra/config.yaml"))  # from now on, its model is trusted
    yield tmp_path
    sys.modules.pop("mine", None)


def train(place, *overrides):
    (place / "text.txt").write_text("no unsafe update ever reaches the weights. " * 50)
    return stabletrain.train([*overrides, f"data.path={place / 'text.txt'}", f"hydra.run.dir={place / 'run'}"]).folder


def told(capsys, *typed):
    assert main(["export", *map(str, typed)]) == 0
    return capsys.readouterr().out


def refused(capsys, *typed, code=2):
    assert main(["export", *map(str, typed)]) == code
    error = capsys.readouterr().err
    assert error.startswith("stabletrain: ")
    assert error.count("\n") == 1, "one line"
    return error


def loaded(output):
    """Runs the lines that the command prints after `load`, up to the first that is not Python; returns their names."""
    lines = output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("load "))
    after = [line[9:] for line in lines[first:] if line.startswith(("load ", " " * 9))]
    names = {"stabletrain": stabletrain}
    for line in after:
        if not line.startswith(("stabletrain ", "logits =")):
            exec(line, names)
    return names


@pytest.mark.parametrize("run", ["one_process", "fsdp", "plugin_run"])
def test_any_run_is_exported_to_safetensors_and_built_again_from_them(run, place, capsys):
    output = told(capsys, run, "--to", "safetensors")
    model = stabletrain.load(run)
    again = loaded(output)["model"]
    assert type(again) is type(model)
    assert not again.training
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    inputs = torch.randn(2, 8) if run == "plugin_run" else torch.arange(8).reshape(1, 8)
    assert torch.equal(again(inputs), model(inputs))
    assert f"wrote    {run}/export/safetensors-step-00000012\n" in output
    assert f"from     {run}/checkpoints/step-00000012, val loss" in output
    config = json.loads((place / run / "export" / "safetensors-step-00000012" / "config.json").read_text())
    assert config["step"] == "12"
    assert None not in config["model"].values(), "sizes that the data determined are filled in"


def test_the_newest_healthy_checkpoint_is_exported_or_the_one_named(tmp_path, capsys):
    run = train(tmp_path, *GPT2)
    states = {
        name: dict(stabletrain.load(run / "checkpoints" / name).state_dict())
        for name in os.listdir(run / "checkpoints")
    }
    newest, earlier = "step-00000003", "step-00000002"
    for number, (what, name) in enumerate(((run, newest), (run / "checkpoints" / earlier, earlier))):
        told(capsys, what, "--to", "safetensors", "--out", tmp_path / str(number))
        assert same(load_file(tmp_path / str(number) / "model.safetensors"), states[name])
    data = next((run / "checkpoints" / newest).glob("model.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert main(["export", str(run), "--to", "safetensors"]) == 0
    said = capsys.readouterr()
    assert "checkpoint skipped" in said.err
    assert f"from     {run / 'checkpoints' / earlier}" in said.out


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16_params", "fp8"])
def test_weights_of_every_precision_come_out_as_fp32_that_holds_them(precision, tmp_path, capsys):
    run = train(tmp_path, *GPT2, f"precision={precision}", "qkclip=kimi", "compile=false")
    told(capsys, run, "--to", "safetensors", "--out", tmp_path / "out")
    saved = load_file(run / "checkpoints" / "step-00000003" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert same(found, {name: tensor.float() for name, tensor in saved.items()})


def test_what_no_library_has_is_refused_with_the_reason(place, capsys):
    assert "model.position=rope (GPT-2: learned)" in refused(capsys, "one_process", "--to", "hf")
    said = refused(capsys, "plugin_run", "--to", "hf")
    assert "model=mine: neither transformers nor torchvision has mine.Model" in said
    assert "use --to safetensors or --to onnx" in said
    assert not (place / "one_process" / "export").exists()


def test_a_wrong_call_is_one_line(place, capsys):
    assert "one_proces: there is no such folder; did you mean one_process?" in refused(
        capsys, "one_proces", "--to", "hf"
    )
    shutil.rmtree(place / "fsdp" / "checkpoints")
    assert "fsdp has no checkpoint" in refused(capsys, "fsdp", "--to", "safetensors")
    assert "holds no usable checkpoint" in refused(capsys, place, "--to", "safetensors")
    assert "holds other files (conf)" in refused(
        capsys, "one_process", "--to", "safetensors", "--out", "plugin", "--overwrite"
    )
    with pytest.raises(SystemExit) as end:
        main(["export", "one_process", "--to", "onxx"])
    assert end.value.code == 2
    assert "invalid choice: 'onxx'" in capsys.readouterr().err


def test_an_earlier_export_is_kept_unless_told(place, capsys):
    told(capsys, "one_process", "--to", "safetensors", "--out", "out")
    before = (place / "out" / "config.json").stat()
    assert "add --overwrite" in refused(capsys, "one_process", "--to", "safetensors", "--out", "out")
    assert (place / "out" / "config.json").stat().st_ino == before.st_ino
    told(capsys, "one_process", "--to", "safetensors", "--out", "out", "--overwrite")
    assert (place / "out" / "config.json").stat().st_ino != before.st_ino


def test_ctrl_c_leaves_nothing(place, monkeypatch):
    def interrupted(self, trained, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Safetensors, "write", interrupted)
    assert main(["export", "one_process", "--to", "safetensors"]) == 130
    assert not os.listdir(place / "one_process" / "export")


def command(*typed, cwd):
    """Runs `stabletrain export` as a user does; returns what it prints."""
    done = python("-m", "stabletrain", "export", *map(str, typed), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_of_gpt2_goes_to_every_format_and_through_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = train(tmp_path, *GPT2)
    model, tokens = stabletrain.load(run), torch.randint(256, (2, 16))
    hf = told(capsys, run, "--to", "hf")  # in this process, which imports the libraries for all tests
    assert "checked  transformers " in hf
    tokenizer = loaded(hf)["tokenizer"]
    text = "def f(x):\n\treturn  x # häß\u2028 \0 \x7f 𝒳 \xa0"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.decode([255, 65]) == "\ufffdA", "bytes that are no UTF-8"
    with torch.no_grad():
        logits = model(tokens)
        assert (loaded(hf)["model"](tokens).logits - logits).abs().max() < 1e-5
    onnx = told(capsys, run, "--to", "onnx")
    assert "checked  onnxruntime " in onnx
    session = loaded(onnx)["session"]
    assert np.abs(session.run(None, {"inputs": tokens.numpy()})[0] - logits.numpy()).max() < 1e-4
    again = command(run, "--to", "safetensors", cwd=tmp_path)
    assert torch.equal(loaded(again)["model"](tokens), logits)


def test_the_tokenizer_is_that_of_the_data(tmp_path):
    (tmp_path / "text.txt").write_text("no unsafe update ever reaches the weights. " * 50)
    assert main(["prepare", str(tmp_path / "text.txt"), str(tmp_path / "shards"), "--tokenizer", "bytes"]) == 0
    for data, tokenizer in (("data=text", "bytes"), ("data=tokens", "bytes"), ("data=digits", None)):
        with composed(data, *([] if data == "data=digits" else [f"data.path={tmp_path / 'shards'}"])) as cfg:
            assert tokenizer_of(Choice.of(cfg, "data")) == tokenizer
            assert bool(reads(Choice.of(cfg, "data"))) == (data == "data=digits")
    with composed("data=tokens", "data.path=nowhere") as cfg:
        assert tokenizer_of(Choice.of(cfg, "data")) is None


@pytest.mark.slow
def test_a_gpt_with_every_part_goes_to_onnx(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parts = ["model=gpt_nano", "qknorm=layernorm", "softcap=gemma2", "model.norm=rmsnorm", "model.mlp=swiglu"]
    run = train(tmp_path, *GPT2, *parts)
    session, tokens = loaded(told(capsys, run, "--to", "onnx"))["session"], torch.randint(256, (3, 9))
    with torch.no_grad():
        logits = stabletrain.load(run)(tokens).numpy()
    assert np.abs(session.run(None, {"inputs": tokens.numpy()})[0] - logits).max() < 1e-4


@pytest.mark.slow
def test_a_run_of_resnet18_goes_to_torchvision_and_onnx(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for i in range(8):
                image = Image.fromarray(pixels.integers(0, 256, (64, 64, 3), np.uint8))
                image.save(tmp_path / "images" / split / name / f"{i}.png")
    data = ["model=resnet18", "data=imagefolder", f"data.path={tmp_path / 'images'}", "data.image_size=64"]
    run = stabletrain.train(
        [*data, "batch_size=8", "steps=2", "precision=fp32", *OTHERS, f"hydra.run.dir={tmp_path / 'run'}"]
    ).folder
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        logits = stabletrain.load(run)(images)
        output = told(capsys, run, "--to", "hf")
        assert "data.mean=[0.485, 0.456, 0.406] and data.std=[0.229, 0.224, 0.225]" in output
        theirs = loaded(output)["model"].eval()
        assert (theirs(images) - logits).abs().max() < 1e-5
    session = loaded(told(capsys, run, "--to", "onnx"))["session"]
    assert np.abs(session.run(None, {"inputs": images.numpy()})[0] - logits.numpy()).max() < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_a_users_model_goes_to_onnx(capsys):
    session = loaded(told(capsys, "plugin_run", "--to", "onnx"))["session"]
    inputs = torch.randn(5, 8)
    with torch.no_grad():
        outputs = stabletrain.load("plugin_run")(inputs).numpy()
    assert np.abs(session.run(None, {"inputs": inputs.numpy()})[0] - outputs).max() < 1e-4
