"""Token shards and `stabletrain prepare`: what is written is read back, and broken folders are refused."""

import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from stabletrain.cli.commands import main
from stabletrain.data.prepare import prepare
from stabletrain.data.tokens import Tokens
from stabletrain.errors import ConfigError


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i} äöü\n" for i in range(300)))
    return tmp_path / "a.txt"


def test_shards_hold_the_text_and_windows_cross_them(tmp_path, text):
    meta = prepare(str(text), str(tmp_path / "out"), val_fraction=0.2, shard_tokens=100)
    assert len(meta["splits"]["train"]) > 10
    data = Tokens(str(tmp_path / "out"), block_size=250, seed=0)
    content = text.read_bytes()
    seen = data.batch(0, 3, "val")
    joined = bytes(np.concatenate([[seen.inputs[0, 0]], seen.targets.flatten()]).clip(0).astype(np.uint8))
    assert joined[:400] in content
    for step in range(5):
        row = data.batch(step, 1, "train")
        assert bytes(row.inputs[0].tolist()).rstrip(b"\0") in content
    assert data.decode(data.encode("äöü")) == "äöü"


def test_a_source_points_at_the_shard_and_its_byte(tmp_path, text):
    prepare(str(text), str(tmp_path / "out"), shard_tokens=100, val_fraction=0.2)
    batch = Tokens(str(tmp_path / "out"), block_size=16, seed=0).batch(1, 8, "train")
    for row, source in zip(batch.inputs, batch.sources, strict=True):
        file, _, offset = source.rpartition(":")
        assert Path(file).read_bytes()[int(offset)] == row[0]


def test_a_billion_tokens_open_at_once_and_are_never_read_whole(tmp_path):
    folder = tmp_path / "big"
    folder.mkdir()
    splits = {}
    for split, count in (("train", 10**9), ("val", 10**6)):
        with (folder / f"{split}.bin").open("wb") as file:
            file.truncate(count * 2)  # a sparse file: no disk is used
        splits[split] = [{"file": f"{split}.bin", "tokens": count}]
    meta = {"version": 1, "tokenizer": "bytes", "vocab_size": 300, "dtype": "uint16", "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta))
    tracemalloc.start()
    data = Tokens(str(folder), block_size=1024, seed=0)
    batch = data.batch(10**6, 8, "train")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.inputs.shape == (8, 1024)
    assert peak < 2_000_000
    assert "1,001,000,000 tokens" in data.summary


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


def test_a_byte_pair_vocabulary_is_used_and_stored_in_16_bits(tmp_path, text, monkeypatch):
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)} | {b"li": 256, b"ne": 257, b"line": 258}
    tiny = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 259})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: tiny)
    meta = prepare(str(text), str(tmp_path / "out"), tokenizer="gpt2", val_fraction=0.2)
    assert (meta["dtype"], meta["vocab_size"], meta["tokenizer"]) == ("uint16", 260, "gpt2")
    data = Tokens(str(tmp_path / "out"), block_size=32, seed=0)
    assert 258 in data.batch(0, 4, "train").inputs
    assert data.decode(data.batch(0, 1, "val").inputs[0].tolist()) in text.read_text()


def test_a_vocabulary_that_cannot_be_fetched_is_one_message(tmp_path, text, monkeypatch):
    import tiktoken

    def unreachable(name):
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(ConfigError, match="tokenizer=gpt2: its vocabulary could not be downloaded.*TIKTOKEN_CACHE_DIR"):
        prepare(str(text), str(tmp_path / "out"), tokenizer="gpt2")


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


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "meta.json").unlink(), "has no meta.json.*stabletrain prepare"),
        (lambda folder: (folder / "meta.json").write_text("{"), "is no manifest of token shards"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "is no manifest of token shards"),
        (lambda folder: (folder / "train-00000.bin").write_bytes(b"x"), "has 1 bytes, the manifest says"),
        (lambda folder: (folder / "val-00000.bin").unlink(), "is missing, the manifest says"),
    ],
)
def test_a_broken_folder_is_refused_with_what_is_wrong(tmp_path, text, spoil, message):
    prepare(str(text), str(tmp_path / "out"), val_fraction=0.2)
    spoil(tmp_path / "out")
    with pytest.raises(ConfigError, match=message):
        Tokens(str(tmp_path / "out"), block_size=16, seed=0)


def test_a_manifest_of_another_version_is_refused(tmp_path, text):
    prepare(str(text), str(tmp_path / "out"), val_fraction=0.2)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    (tmp_path / "out" / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(ConfigError, match="is of version 99"):
        Tokens(str(tmp_path / "out"), block_size=16, seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"val_fraction": 0.0}, "--val-fraction=0.0"),
        ({"shard_tokens": 0}, "--shard-tokens=0"),
        ({"tokenizer": "nope"}, "tokenizer=nope is none of"),
    ],
)
def test_bounds_are_named(tmp_path, text, values, message):
    with pytest.raises(ConfigError, match=message):
        prepare(str(text), str(tmp_path / "out"), **values)
