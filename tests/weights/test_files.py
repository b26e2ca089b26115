"""Safetensors files in a folder: which of them count, and what is refused; nothing is unpickled."""

import json

import pytest
import torch
from safetensors.torch import save_file

from stabletrain.errors import ConfigError
from stabletrain.weights.files import files_of, pickled_in, read, sha256

A, B = {"a": torch.arange(3.0)}, {"b.weight": torch.ones(2, 2, dtype=torch.bfloat16)}


def index(folder, **named):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


def loaded(folder):
    return read(folder, files_of(folder))


def test_one_file_several_files_and_an_index_are_read_as_they_were_saved(tmp_path):
    save_file(A, tmp_path / "first.safetensors")
    save_file(B, tmp_path / "second.safetensors")
    (tmp_path / "notes.txt").write_text("no weights")
    both = loaded(tmp_path)
    assert all(torch.equal(both[name], tensor) for name, tensor in (A | B).items())
    assert both["b.weight"].dtype == torch.bfloat16
    index(tmp_path, a="first.safetensors")
    assert loaded(tmp_path).keys() == A.keys(), "an index names the files that count"
    save_file(B, tmp_path / "model.safetensors")
    assert loaded(tmp_path).keys() == B.keys(), "a single file comes first, as in transformers"


@pytest.mark.parametrize("named", ["gone.safetensors", "../outside.safetensors"])
def test_an_index_names_only_files_in_its_folder(tmp_path, named):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(A, tmp_path / "outside.safetensors")
    index(folder, a=named)
    with pytest.raises(ConfigError, match=f"names {named}, which is not in the folder"):
        files_of(folder)


def test_a_damaged_index_two_models_and_a_damaged_file_are_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index.json is no index of safetensors"):
        files_of(tmp_path)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="leave one model in the folder"):
        files_of(tmp_path)
    for name in ("x", "y"):
        save_file(A, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"holds 'a' in two files, x.safetensors and y.safetensors"):
        read(tmp_path, ["x.safetensors", "y.safetensors"])
    (tmp_path / "x.safetensors").write_bytes(b"no header")
    with pytest.raises(ConfigError, match=r"x.safetensors cannot be read .*: copy it again"):
        read(tmp_path, ["x.safetensors"])


def test_pickled_files_are_known_by_their_endings(tmp_path):
    for name in ("model.pt", "pytorch_model.bin", "last.ckpt", "net.pth", "__0_0.distcp", "readme.md"):
        (tmp_path / name).touch()
    assert pickled_in(tmp_path) == ["__0_0.distcp", "last.ckpt", "model.pt", "net.pth", "pytorch_model.bin"]
    assert files_of(tmp_path) == []


def test_the_hash_is_sha256(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(ConfigError, match="gone cannot be read"):
        sha256(tmp_path / "gone")
