"""Checkpoints written by several ranks: complete or absent, and an error names the rank that failed and why."""

import errno
import json
import math
import os
import threading

import pytest
import torch

from stabletrain.checkpoint import sharded, writer
from stabletrain.checkpoint.reader import peek, verify
from stabletrain.checkpoint.sharded import RankShard, begin, note_of
from stabletrain.checkpoint.tree import ShardWriters
from stabletrain.checkpoint.writer import write_file
from tests.checkpoint.given import as_rank

WEIGHTS = torch.arange(10.0).view(5, 2)
MOMENTS = {"exp_avg": WEIGHTS / 2, "exp_avg_sq": WEIGHTS.square()}
ABOUT = {"step": 7, "info": {"run": "abc"}, "healthy": True, "val_loss": 2.5}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def shards(folder, count=2, weights=WEIGHTS, ending=None):
    """Begins a checkpoint; returns each rank's shard of its state."""
    temporary, found = begin(folder, 7, 0), []
    for rank in range(count):
        with as_rank(rank, count) as shard:
            state = {"w": {name: shard(moment) for name, moment in MOMENTS.items()}}
            tree = {"model": {"w": shard(weights), "b": torch.ones(1)}, "optimizer": {"state": state}, "step": 7}
            writers = ShardWriters(rank, count, math.inf, lambda question: question())
            found.append(RankShard(temporary, writers, tree, ending or threading.Event(), write_file))
    return found


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_shards_of_all_ranks_make_up_the_whole_state(folder, count):
    first, *others = shards(folder, count)
    for other in others:
        other.write(healthy=True)
    path, bad = first.publish(folder, ABOUT)
    assert (path, bad) == (folder / "step-00000007", None)
    assert names(folder) == ["step-00000007"]
    found = verify(path)
    assert (found.step, found.healthy, found.val_loss, found.info) == (7, True, 2.5, {"run": "abc"})
    tree = found.load()
    assert torch.equal(tree["model"]["w"], WEIGHTS)
    assert torch.equal(tree["model"]["b"], torch.ones(1))
    assert torch.equal(tree["optimizer"]["state"]["w"]["exp_avg_sq"], MOMENTS["exp_avg_sq"])
    assert tree["step"] == 7
    assert not [*path.glob(".*")], "the notes of the ranks are deleted"


def test_rank_0_publishes_after_the_last_rank_has_written(folder):
    first, second = shards(folder)
    timer = threading.Timer(0.1, second.write, [True])
    timer.start()
    path, _ = first.publish(folder, ABOUT)
    timer.join()
    assert torch.equal(peek(path).load_model()["w"], WEIGHTS)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "full"), os.strerror(errno.ENOSPC)),
        (ZeroDivisionError(), "an exception that is no I/O error"),
    ],
    ids=["full disk", "exception"],
)
def test_if_a_rank_cannot_write_the_checkpoint_fails_and_the_error_names_the_rank(folder, monkeypatch, error, said):
    first, second = shards(folder)
    write_file = writer.write_file

    def failing(path, content):
        raise error

    monkeypatch.setattr(writer, "write_file", failing)
    with pytest.raises(type(error)):
        second.write(healthy=True)
    monkeypatch.setattr(writer, "write_file", write_file)
    with pytest.raises(OSError, match=f"rank 1: {said}") as refused:
        first.publish(folder, ABOUT)
    assert refused.value.errno == (getattr(error, "errno", None) or errno.EIO)
    assert names(folder) == []


def test_if_rank_0_cannot_write_the_error_is_its_own(folder, monkeypatch):
    first, _ = shards(folder)

    def failing(path, content):
        raise OSError(errno.ENOSPC, "the disk of rank 0")

    monkeypatch.setattr(writer, "write_file", failing)
    with pytest.raises(OSError, match="the disk of rank 0"):
        first.publish(folder, ABOUT)
    assert names(folder) == []


@pytest.mark.parametrize("bound", ["PATIENCE", "GRACE", "patience"])
def test_waiting_for_a_missing_shard_is_bounded(folder, monkeypatch, bound):
    """Rank 0 waits for `PATIENCE` or less while the run continues, and for `GRACE` if it is ending with an error."""
    ending = threading.Event()
    if bound == "GRACE":
        ending.set()
    first, _ = shards(folder, ending=ending)
    if bound == "patience":
        first.writers = first.writers._replace(patience=0.05)
    else:
        monkeypatch.setattr(sharded, bound, 0.05)
    with pytest.raises(OSError, match="rank 1 has not written its part within 0 s") as refused:
        first.publish(folder, ABOUT)
    assert refused.value.errno == errno.ETIMEDOUT
    assert names(folder) == []


def test_a_rank_writes_its_note_last_and_lists_its_files(folder):
    _, second = shards(folder)
    assert not note_of(second.temporary, 1).exists()
    second.write(healthy=True)
    note = json.loads(note_of(second.temporary, 1).read_text())
    assert note["bad"] is None
    assert {*note["files"]} == {
        f"{part}/shard-00002-model-00001-of-00001.safetensors" for part in ("model", "training")
    }
    for name, entry in note["files"].items():
        assert (second.temporary / name).stat().st_size == entry["bytes"]


def test_each_attempt_starts_in_its_own_empty_folder(folder):
    first = begin(folder, 7, 0)
    (first / "model" / "late").write_text("of another attempt")
    assert begin(folder, 7, 1) != first
    assert [*(begin(folder, 7, 0) / "model").iterdir()] == []
    assert all(name.startswith(".") for name in names(folder)), "none of them has the name of a checkpoint"
