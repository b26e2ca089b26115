"""Token shards are read as they were written; invalid folders are refused."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from stabletrain.data.prepare import prepare
from stabletrain.data.tokens import Tokens
from stabletrain.errors import ConfigError


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
        file, _, offset = source.rpartition(" at byte ")
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


def test_many_shards_need_few_file_descriptors(tmp_path, monkeypatch, text):
    # Each open shard has a file descriptor, and a process often may have 1,024 of them.
    monkeypatch.setattr("stabletrain.data.tokens.OPEN", 5)
    read = []
    for name, size in (("one", 10**9), ("many", 20)):
        meta = prepare(str(text), str(tmp_path / name), val_fraction=0.2, shard_tokens=size)
        before = len(os.listdir("/proc/self/fd"))
        data = Tokens(str(tmp_path / name), block_size=50, seed=0)
        read.append([data.batch(step, 4, split) for split in ("train", "val") for step in range(4)])
        assert len(os.listdir("/proc/self/fd")) - before <= 2 * 5
    assert len(meta["splits"]["train"]) > 20
    for one, many in zip(*read, strict=True):
        assert torch.equal(one.inputs, many.inputs)
        assert torch.equal(one.targets, many.targets)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "meta.json").unlink(), "has no meta.json.*stabletrain prepare"),
        (lambda folder: (folder / "meta.json").write_text("{"), "is not a manifest of token shards"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "is not a manifest of token shards"),
        (lambda folder: (folder / "train-00000.bin").write_bytes(b"x"), "has 1 bytes, but the manifest says"),
        (lambda folder: (folder / "val-00000.bin").unlink(), "is missing, but the manifest says"),
    ],
)
def test_a_broken_folder_is_refused_with_what_is_wrong(tmp_path, text, spoil, message):
    prepare(str(text), str(tmp_path / "out"), val_fraction=0.2)
    spoil(tmp_path / "out")
    with pytest.raises(ConfigError, match=message):
        Tokens(str(tmp_path / "out"), block_size=16, seed=0)
