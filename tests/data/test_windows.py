"""Windows: an epoch reads each window once, validation covers its whole split, and a length warmup starts short."""

import numpy as np
import pytest
import torch

from stabletrain.data.text import Text
from stabletrain.errors import ConfigError
from stabletrain.records import IGNORE_INDEX
from tests.data.given import texts, tokens


def test_targets_are_the_inputs_one_later(tmp_path):
    batch = Text(str(texts(tmp_path)), 16, 0.1, 0).batch(3, 8, "train")
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all()


def test_validation_covers_its_split_exactly_once_and_pads_what_is_left(tmp_path):
    data = Text(str(texts(tmp_path, length=1003)), block_size=16, val_fraction=0.2, seed=0)
    batches = [data.batch(step, 4, "val") for step in range(data.batches(4, "val"))]
    seen = np.concatenate([b.targets.flatten().numpy() for b in batches])
    end = (texts(tmp_path, length=1003) / "000.txt").read_bytes()[-201:]
    assert bytes(seen[seen != IGNORE_INDEX].astype(np.uint8)) == end[1:], "every byte but the first is a target once"
    with pytest.raises(IndexError):
        data.batch(len(batches), 4, "val")


def test_an_epoch_reads_every_window_once_and_phases_move(tmp_path):
    data = Text(str(texts(tmp_path)), block_size=16, val_fraction=0.1, seed=0)
    count = data.batches(1, "train")
    epochs = [
        [
            int(s.rpartition(" at byte ")[2])
            for step in range(e * count, (e + 1) * count)
            for s in data.batch(step, 1, "train").sources
        ]
        for e in range(4)
    ]
    for offsets in epochs:
        assert np.all(np.diff(sorted(offsets)) == 16)
    assert len({offsets[0] % 16 for offsets in epochs}) > 1
    assert len({tuple(offsets) for offsets in epochs}) == 4


def test_a_batch_is_a_pure_function_of_its_number(tmp_path):
    folder = str(texts(tmp_path))
    one, other = Text(folder, 16, 0.1, seed=3), Text(folder, 16, 0.1, seed=3)
    other.batch(7, 4, "train")
    assert tokens(one.batch(5, 4, "train")) == tokens(other.batch(5, 4, "train"))
    assert tokens(one.batch(5, 4, "train")) != tokens(Text(folder, 16, 0.1, seed=4).batch(5, 4, "train"))


def test_too_little_text_names_both_numbers(tmp_path):
    with pytest.raises(ConfigError, match=r"900 bytes for training, a sample needs data.block_size \+ 1 = 1,025"):
        Text(str(texts(tmp_path)), 1024, 0.1, 0)


def test_sequence_length_warmup_cuts_the_same_samples_off_and_leaves_validation_whole(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(256)) * 40)
    full = Text(str(file), block_size=64)
    grown = Text(str(file), block_size=64, length_warmup=10, length_start=8)
    lengths = []
    for step in range(12):
        short, whole = grown.batch(step, 4, "train"), full.batch(step, 4, "train")
        lengths.append(short.inputs.shape[1])
        assert torch.equal(short.inputs, whole.inputs[:, : lengths[-1]])
        assert torch.equal(short.targets, whole.targets[:, : lengths[-1]])
        assert torch.equal(short.ids, whole.ids)
    assert lengths == [8, 8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64]
    assert grown.batch(0, 4, "val").inputs.shape == (4, 64)


def test_a_length_warmup_that_could_do_nothing_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(256)) * 4)
    with pytest.raises(ConfigError, match=r"data\.length_start=64 >= data\.block_size=64"):
        Text(str(file), block_size=64, length_warmup=5, length_start=64)
    with pytest.raises(ConfigError, match=r"data\.length_warmup=-1 is below 0"):
        Text(str(file), block_size=64, length_warmup=-1)
    with pytest.raises(ConfigError, match=r"data\.length_start=0 is below 1"):
        Text(str(file), block_size=64, length_start=0)
