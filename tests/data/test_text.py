"""Text: the split into training and validation bytes, and the source of each sample."""

from inspect import signature
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from stabletrain.data.text import Stdlib, Text
from tests.data.given import texts, tokens
from tests.runs import CONF


@pytest.mark.parametrize("files", [1, 30])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_source_points_at_the_bytes_of_its_sample(tmp_path, files, split):
    data = Text(str(texts(tmp_path, files)), block_size=16, val_fraction=0.2, seed=0)
    for step in range(3):
        batch = data.batch(step, 4, split)
        for source, ours in zip(batch.sources, tokens(batch), strict=True):
            file, _, offset = source.rpartition(" at byte ")
            theirs = Path(file).read_bytes()[int(offset) :][:17]
            assert ours.startswith(theirs), "a sample may go on into the next file"
            assert len(theirs) > 0


@pytest.mark.parametrize(("size", "shown"), [(922, "0.9 kB"), (99_000, "99.0 kB"), (110_000, "0.1 MB")])
def test_the_summary_shows_the_size_of_a_small_file_too(tmp_path, size, shown):
    (tmp_path / "a.txt").write_bytes(b"a" * size)
    assert Text(str(tmp_path / "a.txt"), 16, 0.1, 0).summary == f"a.txt, {shown}, 1 file"


def test_train_and_validation_share_no_byte_of_a_file(tmp_path):
    data = Text(str(texts(tmp_path)), block_size=16, val_fraction=0.2, seed=0)
    last = max(int(s.rpartition(" at byte ")[2]) for step in range(50) for s in data.batch(step, 4, "train").sources)
    first = min(int(s.rpartition(" at byte ")[2]) for s in data.batch(0, 4, "val").sources)
    assert last + 17 <= first


def test_the_split_of_many_files_does_not_depend_on_the_seed_or_on_other_files(tmp_path):
    def held_out(data):
        return {
            s.rpartition(" at byte ")[0]
            for step in range(data.batches(4, "val"))
            for s in data.batch(step, 4, "val").sources
        }

    folder = str(texts(tmp_path, files=40))
    one = held_out(Text(folder, 16, 0.2, seed=0))
    assert one == held_out(Text(folder, 16, 0.2, seed=1))
    texts(tmp_path, files=60)
    more = held_out(Text(folder, 16, 0.2, seed=0))
    assert one == {name for name in more if int(name[-7:-4]) < 40}


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.txt"], "the last 20 % of the file is for validation (data.val_fraction)"),
        (["a.txt", "b.txt"], "the last 20 % of each file is for validation (data.val_fraction)"),
        ([f"{n}.txt" for n in range(20)], "{val} of 20 files are for validation (data.val_fraction)"),
        (
            ["train", "wiki.test.txt"],
            "the last 20 % of each file is for validation (data.val_fraction); the name wiki.test.txt does not choose "
            "a split: data.path=<glob> can leave it out",
        ),
        (["contest.txt", "values.txt"], "the last 20 % of each file is for validation (data.val_fraction)"),
    ],
    ids=["one file", "two files", "many files", "a file named test", "names that only contain such a word"],
)
def test_the_user_is_told_how_the_text_is_split(tmp_path, names, told):
    for name in names:
        (tmp_path / name).write_text(100 * "some text ")
    data = Text(str(tmp_path), block_size=16, val_fraction=0.2)
    sources = [s for step in range(data.batches(4, "val")) for s in data.batch(step, 4, "val").sources]
    assert data.split == told.format(val=len({source.rpartition(" at byte ")[0] for source in sources}))


@pytest.mark.parametrize(("kind", "option"), [(Stdlib, "stdlib"), (Text, "text")])
def test_a_default_in_python_is_the_one_in_the_yaml(kind, option):
    options = OmegaConf.load(CONF / "data" / f"{option}.yaml")
    defaults = {name: p.default for name, p in signature(kind).parameters.items() if p.default is not p.empty}
    assert "val_fraction" in defaults
    del defaults["seed"]  # the run's own seed in the YAML
    assert {name: options[name] for name in defaults} == defaults


def test_the_standard_library_is_there_and_its_fingerprint_is_its_own():
    data = Stdlib(block_size=128, val_fraction=0.02, seed=0)
    assert data.summary.startswith("stdlib, ")
    assert data.fingerprint()["train_tokens"] > 5_000_000
    assert data.fingerprint() == Stdlib(64, 0.02, 1).fingerprint()
    assert data.decode(data.encode("def ä(self):")) == "def ä(self):"
    assert "/site-packages/" not in data.batch(0, 1, "train").sources[0]
