"""`stabletrain prepare`: whole documents, interruptions that leave no files, and Hugging Face data sets."""

import json
import sys

import numpy as np
import pytest

from stabletrain.cli.commands import main
from stabletrain.data.prepare import prepare
from stabletrain.errors import ConfigError


def test_the_command_prints_how_to_train_and_refuses_to_write_over(tmp_path, text, capsys):
    out = str(tmp_path / "out")
    assert main(["prepare", str(text), out]) == 0
    assert f"next     python train.py data=tokens data.path={out}" in capsys.readouterr().out
    assert main(["prepare", str(text), out]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


def test_many_documents_are_kept_for_validation_whole(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(60):
        (tmp_path / "in" / f"{i}.txt").write_text(f"<{i:02}>" * 20)
    prepare(str(tmp_path / "in"), str(tmp_path / "out"), val_fraction=0.2)
    sides = {
        split: (tmp_path / "out" / f"{split}-00000.bin").read_bytes().split(b"\0")[:-1] for split in ("train", "val")
    }
    assert len(sides["train"]) + len(sides["val"]) == 60
    assert all(len(document) == 80 for documents in sides.values() for document in documents)
    assert not set(sides["train"]) & set(sides["val"])


def test_a_long_document_in_parts_is_the_same_and_line_ends_stay(tmp_path):
    content = "".join(f"line {i}\r\n" for i in range(300_000)).encode()
    (tmp_path / "long.txt").write_bytes(content)
    prepare(str(tmp_path / "long.txt"), str(tmp_path / "out"), val_fraction=0.01)
    train = (tmp_path / "out" / "train-00000.bin").read_bytes()
    val = (tmp_path / "out" / "val-00000.bin").read_bytes()
    assert train[:-1] + val[:-1] == content
    assert train[-1:] == val[-1:] == b"\0"


def test_an_interrupted_preparation_leaves_nothing(tmp_path, text, monkeypatch):
    import stabletrain.data.prepare as module

    def failing(*_):
        yield "a", "some text"
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "texts", lambda source: (True, failing(source)))
    with pytest.raises(KeyboardInterrupt):
        prepare(str(text), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_datasets_that_cannot_be_imported_is_one_message_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "datasets.py").write_text("raise ImportError('pyarrow requires NumPy 2.0 or newer')")
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"imported \(pyarrow requires NumPy 2.0 .*pip install 'stabletrain\[hf\]'"):
        prepare("any", str(tmp_path / "out"), hf=True)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="[hf] needs NumPy 2")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hugging_face_data_set_is_streamed(tmp_path):
    (tmp_path / "set").mkdir()
    rows = [json.dumps({"text": f"document {i} " * 5, "id": i}) for i in range(50)]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "set" / "more.jsonl").write_text(json.dumps({"text": None, "id": 99}))
    prepare(str(tmp_path / "set"), str(tmp_path / "out"), hf=True, val_fraction=0.2)
    content = b"".join((tmp_path / "out" / f"{split}-00000.bin").read_bytes() for split in ("train", "val"))
    assert sorted(content.split(b"\0")[:-1]) == sorted(f"document {i} ".encode() * 5 for i in range(50))
    with pytest.raises(ConfigError, match=r"--column=body is not in .*: its columns are text, id"):
        prepare(str(tmp_path / "set"), str(tmp_path / "other"), hf=True, column="body")


def test_a_name_too_long_for_a_folder_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="its name has 201 bytes, but names may have 200"):
        prepare(str(text), str(tmp_path / ("a" * 201)))
    prepare(str(text), str(tmp_path / ("a" * 200)))
