"""Rows: a rank reads its own samples only, with the bits of a slice of the whole batch."""

import numpy as np
import pytest
import torch

from stabletrain.data.imagefolder import Files, ImageFolder
from stabletrain.data.images import Digits, Images, InMemory
from stabletrain.data.prepare import prepare
from stabletrain.data.text import Text
from stabletrain.data.tokens import Tokens
from stabletrain.data.windows import Windows
from stabletrain.records import IGNORE_INDEX, reads_rows
from tests.data.given import FOLDER, texts

SIZE = 12
RANKS = (1, 2, 3, 4, 6, 12)


def held(augment):
    pixels = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    splits = {split: InMemory(pixels, [i % 3 for i in range(40)], split) for split in ("train", "val")}
    options = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.1], "seed": 3}
    return Images("set", splits, ["a", "b", "c"], size=8, augment=augment, **options)


def folder_of(folder, **options):
    return ImageFolder(str(folder), **(FOLDER | {"val_fraction": 0.5} | options))


def tokens_of(tmp_path):
    prepare(str(texts(tmp_path)), str(tmp_path / "shards"), val_fraction=0.3, shard_tokens=100)
    return Tokens(str(tmp_path / "shards"), 16, seed=2)


MADE = {
    "digits": lambda folder, tmp_path: Digits("crop", seed=1),
    "held, none": lambda folder, tmp_path: held("none"),
    "held, crop_flip": lambda folder, tmp_path: held("crop_flip"),
    "held, resized_crop": lambda folder, tmp_path: held("resized_crop"),
    "folder, crop_flip": lambda folder, tmp_path: folder_of(folder, augment="crop_flip"),
    "folder, not cached": lambda folder, tmp_path: folder_of(folder, augment="crop_flip", cache_mb=0),
    "folder, resized_crop": lambda folder, tmp_path: folder_of(folder, augment="resized_crop"),
    "folder, grey": lambda folder, tmp_path: folder_of(folder, mean=[0.5], std=[0.5]),
    "text": lambda folder, tmp_path: Text(str(texts(tmp_path)), 16, 0.3, seed=2),
    "text, length warmup": lambda folder, tmp_path: Text(str(texts(tmp_path)), 32, 0.3, 2, length_warmup=9),
    "tokens": lambda folder, tmp_path: tokens_of(tmp_path),
}


def layout(tensor):
    """Returns the strides that mean something: those of dimensions with several elements."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and tensor.numel()]


def same(found, expected):
    """Asserts that two batches are equal in every bit and in their memory layout."""
    assert (found.inputs.dtype, found.inputs.shape) == (expected.inputs.dtype, expected.inputs.shape)
    assert layout(found.inputs) == layout(expected.inputs)
    assert found.inputs.contiguous().numpy().tobytes() == expected.inputs.contiguous().numpy().tobytes()
    assert torch.equal(found.targets, expected.targets)
    assert (found.ids is None) == (expected.ids is None)
    assert found.ids is None or torch.equal(found.ids, expected.ids)
    assert list(found.sources) == list(expected.sources)
    assert found.counted == expected.counted


def parts(data, step, split, ranks):
    part = SIZE // ranks
    return [data.rows(step, SIZE, split, slice(rank * part, (rank + 1) * part)) for rank in range(ranks)]


@pytest.mark.parametrize("name", MADE)
def test_rows_are_the_slice_of_the_whole_batch(folder, tmp_path, name):
    data = MADE[name](folder, tmp_path)
    last = data.batches(SIZE, "val") - 1
    steps = [(0, "train"), (5, "train"), (data.batches(SIZE, "train") - 1, "train"), (0, "val"), (last, "val")]
    for step, split in steps:
        whole = data.batch(step, SIZE, split)
        for ranks in RANKS:
            part = SIZE // ranks
            for rank, rows in enumerate(parts(data, step, split, ranks)):
                same(rows.transformed(), whole.shard(slice(rank * part, (rank + 1) * part)))


@pytest.mark.parametrize("name", ["held, crop_flip", "folder, crop_flip", "text"])
def test_micro_batches_of_a_rank_are_those_of_its_slice(folder, tmp_path, name):
    data = MADE[name](folder, tmp_path)
    expected = data.batch(3, SIZE, "train").shard(slice(6, 12)).split(3)
    read = data.rows(3, SIZE, "train", slice(6, 12))
    for found in (read.to(torch.device("cpu")).split(3), [each.transformed() for each in read.split(3)]):
        for one, other in zip(found, expected, strict=True):
            same(one, other)


@pytest.mark.beside
@pytest.mark.parametrize("fault", ["Input", "Label", "Ignored", "Empty", "Poison"])
@pytest.mark.parametrize("name", ["folder, crop_flip", "text"])
def test_a_fault_has_the_same_samples_on_every_number_of_ranks(folder, tmp_path, name, fault):
    from stabletrain.beside import faults

    data = getattr(faults, fault)(at=[2]).data(MADE[name](folder, tmp_path))
    for step in (1, 2):
        whole = data.batch(step, SIZE, "train")
        for rank, rows in enumerate(parts(data, step, "train", 3)):
            if len(whole):
                same(rows.transformed(), whole.shard(slice(rank * 4, (rank + 1) * 4)))
            else:
                assert (len(rows), rows.counted) == (0, 0)


class Plain:
    def batch(self, step, size, split): ...


class WithRows(Plain):
    def rows(self, step, size, split, rows): ...


class OtherBatch(WithRows):
    def batch(self, step, size, split): ...


class Both(OtherBatch):
    def batch(self, step, size, split): ...

    def rows(self, step, size, split, rows): ...


class Forwards(Plain):
    def __getattr__(self, name):
        return getattr(WithRows(), name)


class Number(Plain):
    rows = 3


KINDS = [(Plain, False), (WithRows, True), (OtherBatch, False), (Both, True), (Forwards, False), (Number, False)]


@pytest.mark.parametrize(("kind", "reads"), KINDS)
def test_rows_that_do_not_know_the_batch_of_the_class_are_not_used(kind, reads):
    assert reads_rows(kind()) is reads
    replaced = kind()
    replaced.batch = lambda step, size, split: None
    assert not reads_rows(replaced)


@pytest.mark.beside
@pytest.mark.parametrize(("kind", "reads"), KINDS)
def test_data_with_a_fault_reads_rows_if_the_data_do(kind, reads):
    from stabletrain.beside.faults import Label

    assert reads_rows(Label(at=[1]).data(kind())) is reads


@pytest.mark.parametrize("augment", ["crop_flip", "resized_crop"])
def test_a_rank_decodes_only_its_own_images(folder, monkeypatch, augment):
    data, decoded, real = folder_of(folder, augment=augment, cache_mb=0), [], Files.__call__
    monkeypatch.setattr(Files, "__call__", lambda self, index: (decoded.append(index), real(self, index))[1])
    for split in ("train", "val"):
        rows = data.rows(0, 4, split, slice(1, 3))
        assert sorted(decoded) == sorted(rows.ids.tolist())
        assert len(decoded) == 2
        decoded.clear()


def test_a_rank_reads_only_its_own_text(tmp_path):
    data = Text(str(texts(tmp_path)), 16, 0.3, seed=2)
    assert isinstance(data, Windows)
    for split, stream in (("train", data._train), ("val", data._val)):
        read, real = [], stream.read
        stream.read = lambda start, stop, read=read, real=real: (read.append(start), real(start, stop))[1]
        rows = data.rows(0, 8, split, slice(2, 5))
        assert read == rows.ids.tolist()
        assert len(read) == 3


def test_targets_that_are_ignored_are_not_counted(tmp_path):
    data = Text(str(texts(tmp_path, length=1003)), block_size=16, val_fraction=0.2, seed=0)
    last = data.batches(4, "val") - 1
    whole = data.batch(last, 4, "val")
    assert (whole.targets == IGNORE_INDEX).any()
    assert data.rows(last, 4, "val", slice(0, 1)).counted == int((whole.targets != IGNORE_INDEX).sum())
    pictures = held("none")
    pictures._splits["train"].labels = np.where(np.arange(40) % 4, np.arange(40) % 3, IGNORE_INDEX)
    pictures._splits["train"].targets = torch.from_numpy(pictures._splits["train"].labels)
    whole = pictures.batch(0, SIZE, "train")
    counted = pictures.rows(0, SIZE, "train", slice(0, 1)).counted
    assert counted == int((whole.targets != IGNORE_INDEX).sum()) < SIZE
