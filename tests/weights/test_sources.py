"""What `init_from` may name, and which files of it are read."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stabletrain.checkpoint.folder import find as find_checkpoint
from stabletrain.checkpoint.reader import render
from stabletrain.errors import ConfigError
from stabletrain.weights.place import existing_folder
from stabletrain.weights.sources import find
from tests.runs import ROOT

RUN = ROOT / "tests" / "fixtures" / "one_process"
SHARDED = ROOT / "tests" / "fixtures" / "fsdp"


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(RUN, tmp_path / "run")


def steps(run):
    return sorted((run / "checkpoints").glob("step-*"))


def found(path, as_gpt2=False):
    return find(str(path), as_gpt2=as_gpt2)


def damage(checkpoint):
    """Flips a bit of the last weight."""
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


def change(checkpoint, **values):
    """Rewrites the manifest, with a right checksum."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"]
    (checkpoint / "manifest.json").write_bytes(render(manifest | values))


@pytest.mark.parametrize("folder", [RUN, SHARDED], ids=["one file", "a file per rank"])
def test_a_run_stands_for_its_newest_healthy_checkpoint_and_is_read_whole(folder):
    source = found(folder)
    newest = find_checkpoint(folder)
    assert (source.kind, source.path, source.step) == ("run", newest.path, newest.step)
    tensors, expected = source.read(), newest.load_model()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    record = source.record()
    assert (record["path"], record["kind"], record["step"]) == (str(newest.path), "run", newest.step)
    assert sorted(record["sha256"]) == sorted(
        str(file.relative_to(newest.path))
        for file in newest.path.rglob("*model*.safetensors")
        if "training" not in str(file)
    )


def test_an_unhealthy_and_a_damaged_checkpoint_of_a_run_are_passed_over(run, capsys):
    *_, earlier, last = steps(run)
    change(last, healthy=False)
    assert found(run).path == earlier
    assert f"{last} is not healthy" in capsys.readouterr().err
    change(last, healthy=True)
    assert found(run).path == last
    damage(last)
    assert found(run).path == earlier
    assert "model.safetensors does not match its checksum" in capsys.readouterr().err


def test_one_checkpoint_is_taken_as_it_is_named(run):
    first = steps(run)[0]
    source = found(first)
    assert (source.kind, source.path) == ("checkpoint", first)
    damage(first)
    with pytest.raises(ConfigError, match=r"init_from=.*: model.safetensors does not match its checksum"):
        found(first)


def test_a_folder_of_safetensors_is_hashed_and_read(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "net.safetensors")
    source = found(tmp_path)
    assert (source.kind, source.step) == ("safetensors", None)
    assert list(source.files) == ["net.safetensors"]
    assert len(source.files["net.safetensors"]) == 64
    assert source.read()["w"].tolist() == [1, 1]
    assert "step" not in source.record()


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "weights.pkl"])
def test_a_pickle_is_refused_with_what_converts_it_and_never_unpickled(tmp_path, name):
    folder, proof = tmp_path / "net", tmp_path / "executed"
    folder.mkdir()
    with open(folder / name, "wb") as file:
        pickle.dump(Bomb(proof), file)
    with pytest.raises(
        ConfigError,
        match=rf"only pickled weights \({name}\).* convert it with python -c .* .*/{name} .*/model.safetensors$",
    ):
        found(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"only pickled weights"):
        found(folder, as_gpt2=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    assert found(folder).read().keys() == {"w"}, "with safetensors beside it, the pickle is left alone"
    assert not proof.exists()


def test_the_command_that_converts_a_pickle_works(tmp_path):
    from safetensors.torch import load_file

    from stabletrain.weights.sources import CONVERT

    model = nn.Linear(2, 3)
    torch.save({**model.state_dict(), "tied": model.weight.data.t()}, tmp_path / "net.pt")
    code = CONVERT.partition("'")[2].removesuffix("'")
    import sys
    from unittest.mock import patch

    with patch.object(sys, "argv", ["-c", str(tmp_path / "net.pt"), str(tmp_path / "model.safetensors")]):
        exec(code, {})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], model.weight)


def test_what_holds_no_weights_is_one_clear_line(tmp_path):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "file.txt").touch()
    for wrong, message in (
        ("outputz", r"there is no such folder; did you mean outputs\?"),
        ("far/away", "there is no such folder, so there are no weights"),
        ("file.txt", "is a file: name the folder that holds it"),
        ("outputs", "it holds no weights: name a run folder, one checkpoint in it, or a folder of .safetensors"),
    ):
        with pytest.raises(ConfigError, match=f"init_from={tmp_path / wrong}:? {message}"):
            found(tmp_path / wrong)
    with pytest.raises(ConfigError, match="init_from= has no value"):
        existing_folder("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="this run has no checkpoint"):
        found(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="holds no usable checkpoint"):
        found(tmp_path / "run")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "multirun.yaml").touch()
    with pytest.raises(ConfigError, match="this is a sweep: name one of its runs, such as sweep/0"):
        found(tmp_path / "sweep")


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 30)], ids=["name", "path"])
def test_a_name_that_is_too_long_is_no_folder(name):
    with pytest.raises(ConfigError, match="there is no such folder"):
        existing_folder(name)
