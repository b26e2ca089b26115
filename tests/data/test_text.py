"""Text: splits, windows and sources, against the bytes of the files themselves."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stabletrain.data.text import Stdlib, Text
from stabletrain.errors import ConfigError
from stabletrain.records import IGNORE_INDEX


def make(tmp_path, files=1, length=1000):
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    for number in range(files):
        words = " ".join(str(number * 100_000 + i) for i in range(length))
        (folder / f"{number:03}.txt").write_text(words[:length])
    return folder


def tokens(batch):
    """The bytes of each sample, the last target included."""
    return [bytes([*row.tolist(), last]) for row, last in zip(batch.inputs, batch.targets[:, -1].tolist(), strict=True)]


@pytest.mark.parametrize("files", [1, 30])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_source_points_at_the_bytes_of_its_sample(tmp_path, files, split):
    data = Text(str(make(tmp_path, files)), block_size=16, val_fraction=0.2, seed=0)
    for step in range(3):
        batch = data.batch(step, 4, split)
        for source, ours in zip(batch.sources, tokens(batch), strict=True):
            file, _, offset = source.rpartition(":")
            theirs = Path(file).read_bytes()[int(offset) :][:17]
            assert ours.startswith(theirs), "a sample may go on into the next file"
            assert len(theirs) > 0


def test_targets_are_the_inputs_one_later(tmp_path):
    batch = Text(str(make(tmp_path)), 16, 0.1, 0).batch(3, 8, "train")
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all()


def test_validation_covers_its_split_exactly_once_and_pads_what_is_left(tmp_path):
    data = Text(str(make(tmp_path, length=1003)), block_size=16, val_fraction=0.2, seed=0)
    batches = [data.batch(step, 4, "val") for step in range(data.batches(4, "val"))]
    seen = np.concatenate([b.targets.flatten().numpy() for b in batches])
    end = (make(tmp_path, length=1003) / "000.txt").read_bytes()[-201:]
    assert bytes(seen[seen != IGNORE_INDEX].astype(np.uint8)) == end[1:], "every byte but the first is a target once"
    with pytest.raises(IndexError):
        data.batch(len(batches), 4, "val")


def test_train_and_validation_share_no_byte_of_a_file(tmp_path):
    data = Text(str(make(tmp_path)), block_size=16, val_fraction=0.2, seed=0)
    last = max(int(s.rpartition(":")[2]) for step in range(50) for s in data.batch(step, 4, "train").sources)
    first = min(int(s.rpartition(":")[2]) for s in data.batch(0, 4, "val").sources)
    assert last + 17 <= first


def test_the_split_of_many_files_does_not_depend_on_the_seed_or_on_other_files(tmp_path):
    def held_out(data):
        return {
            s.rpartition(":")[0] for step in range(data.batches(4, "val")) for s in data.batch(step, 4, "val").sources
        }

    folder = str(make(tmp_path, files=40))
    one = held_out(Text(folder, 16, 0.2, seed=0))
    assert one == held_out(Text(folder, 16, 0.2, seed=1))
    make(tmp_path, files=60)
    more = held_out(Text(folder, 16, 0.2, seed=0))
    assert one == {name for name in more if int(name[-7:-4]) < 40}


def test_an_epoch_reads_every_window_once_and_phases_move(tmp_path):
    data = Text(str(make(tmp_path)), block_size=16, val_fraction=0.1, seed=0)
    count = data.batches(1, "train")
    epochs = [
        [
            int(s.rpartition(":")[2])
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
    folder = str(make(tmp_path))
    one, other = Text(folder, 16, 0.1, seed=3), Text(folder, 16, 0.1, seed=3)
    other.batch(7, 4, "train")
    assert tokens(one.batch(5, 4, "train")) == tokens(other.batch(5, 4, "train"))
    assert tokens(one.batch(5, 4, "train")) != tokens(Text(folder, 16, 0.1, seed=4).batch(5, 4, "train"))


def test_the_standard_library_is_there_and_its_fingerprint_is_its_own():
    data = Stdlib(block_size=128, val_fraction=0.02, seed=0)
    assert data.summary.startswith("stdlib, ")
    assert data.fingerprint()["train_tokens"] > 5_000_000
    assert data.fingerprint() == Stdlib(64, 0.02, 1).fingerprint()
    assert data.decode(data.encode("def ä(self):")) == "def ä(self):"
    assert "/site-packages/" not in data.batch(0, 1, "train").sources[0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, r"data\.path is not set: data=text needs data\.path=<file, folder or glob>"),
        ("texst", "data.path=texst does not exist: did you mean texts"),
        ("texts/*.md", "holds no text files"),
    ],
)
def test_a_path_that_is_not_there_is_one_message(tmp_path, monkeypatch, path, message):
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Text(path, 16, 0.1, 0)


def test_too_little_text_names_both_numbers(tmp_path):
    with pytest.raises(ConfigError, match=r"900 bytes for training, a sample needs data.block_size \+ 1 = 1,025"):
        Text(str(make(tmp_path)), 1024, 0.1, 0)


def test_a_glob_reads_what_it_matches(tmp_path):
    make(tmp_path, files=3)
    assert Text(str(tmp_path / "texts" / "00[01].txt"), 16, 0.1, 0).fingerprint()["files"] == 2


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
