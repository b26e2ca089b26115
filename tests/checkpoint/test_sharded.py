"""A checkpoint that several ranks write: complete or absent, and it says which rank failed and why."""

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
from stabletrain.checkpoint.tree import ShardTarget
from tests.checkpoint.given import as_rank

WEIGHTS = torch.arange(10.0).view(5, 2)
MOMENTS = {"exp_avg": WEIGHTS / 2, "exp_avg_sq": WEIGHTS.square()}
ABOUT = {"step": 7, "info": {"run": "abc"}, "healthy": True, "val_loss": 2.5}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def parts(folder, count=2, weights=WEIGHTS, ending=None):
    """Each rank's part of a state, at the beginning of a checkpoint."""
    temporary, found = begin(folder, 7, 0), []
    for rank in range(count):
        with as_rank(rank, count) as shard:
            state = {"w": {name: shard(moment) for name, moment in MOMENTS.items()}}
            tree = {"model": {"w": shard(weights), "b": torch.ones(1)}, "optimizer": {"state": state}, "step": 7}
            found.append(RankShard(ShardTarget(temporary, rank, count), tree, ending or threading.Event()))
    return found


def left(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_all_ranks_have_written_is_the_whole_state(folder, count):
    first, *others = parts(folder, count)
    for other in others:
        other.write(healthy=True)
    path, bad = first.publish(folder, **ABOUT)
    assert (path, bad) == (folder / "step-00000007", None)
    assert left(folder) == ["step-00000007"]
    found = verify(path)
    assert (found.step, found.healthy, found.val_loss, found.info) == (7, True, 2.5, {"run": "abc"})
    tree = found.load()
    assert torch.equal(tree["model"]["w"], WEIGHTS)
    assert torch.equal(tree["model"]["b"], torch.ones(1))
    assert torch.equal(tree["optimizer"]["state"]["w"]["exp_avg_sq"], MOMENTS["exp_avg_sq"])
    assert tree["step"] == 7
    assert not [*path.glob(".*")], "no rank's note is left"


def test_rank_0_waits_for_the_others_and_publishes_when_the_last_part_is_there(folder):
    first, second = parts(folder)
    timer = threading.Timer(0.1, second.write, [True])
    timer.start()
    path, _ = first.publish(folder, **ABOUT)
    timer.join()
    assert torch.equal(peek(path).load_model()["w"], WEIGHTS)


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError(errno.ENOSPC, "full"), os.strerror(errno.ENOSPC)), (ZeroDivisionError(), "an error of the program")],
    ids=["full disk", "mistake"],
)
def test_a_rank_that_cannot_write_its_part_costs_the_checkpoint_and_is_named(folder, monkeypatch, error, said):
    first, second = parts(folder)
    write_file = writer.write_file

    def failing(path, content):
        raise error

    monkeypatch.setattr(writer, "write_file", failing)
    with pytest.raises(type(error)):
        second.write(healthy=True)
    monkeypatch.setattr(writer, "write_file", write_file)
    with pytest.raises(OSError, match=f"rank 1: {said}") as refused:
        first.publish(folder, **ABOUT)
    assert refused.value.errno == (getattr(error, "errno", None) or errno.EIO)
    assert left(folder) == []


def test_a_failure_of_rank_0_is_its_own_and_leaves_the_checkpoint_that_was_to_be_replaced(folder, monkeypatch):
    first, second = parts(folder)
    second.write(healthy=True)
    first.publish(folder, **ABOUT)
    first, second = parts(folder, weights=-WEIGHTS)
    second.write(healthy=True)
    monkeypatch.setattr(writer, "write_file", lambda *_: os.stat("/nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        first.publish(folder, **ABOUT)
    assert left(folder) == ["step-00000007"]
    assert torch.equal(verify(folder / "step-00000007").load_model()["w"], WEIGHTS)


@pytest.mark.parametrize("bound", ["PATIENCE", "GRACE"])
def test_a_part_that_never_comes_is_waited_for_within_bounds(folder, monkeypatch, bound):
    """While the run goes on within `PATIENCE`, and when it is ending with an error within `GRACE`."""
    monkeypatch.setattr(sharded, bound, 0.05)
    ending = threading.Event()
    if bound == "GRACE":
        ending.set()
    first, _ = parts(folder, ending=ending)
    with pytest.raises(OSError, match="rank 1 has not written its part within 0 s") as refused:
        first.publish(folder, **ABOUT)
    assert refused.value.errno == errno.ETIMEDOUT
    assert left(folder) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_in_any_part_makes_the_checkpoint_unhealthy(folder, rank, value):
    weights = WEIGHTS.clone()
    weights[-1 if rank else 0] = value
    first, second = parts(folder, weights=weights)
    second.write(healthy=True)
    path, bad = first.publish(folder, **ABOUT)
    assert bad == "w is not finite"
    assert not verify(path).healthy


def test_a_second_moment_below_0_in_any_part_makes_the_checkpoint_unhealthy(folder, monkeypatch):
    damaged = MOMENTS["exp_avg_sq"].clone()
    damaged[-1] = -1.0
    monkeypatch.setitem(MOMENTS, "exp_avg_sq", damaged)
    first, second = parts(folder)
    second.write(healthy=True)
    path, bad = first.publish(folder, **ABOUT)
    assert bad == "optimizer/w/exp_avg_sq is negative"
    assert not peek(path).healthy


def test_what_nobody_believes_healthy_is_not_looked_at(folder):
    first, second = parts(folder, weights=WEIGHTS * math.nan)
    second.write(healthy=False)
    path, bad = first.publish(folder, **{**ABOUT, "healthy": False})
    assert bad is None
    assert not peek(path).healthy


def test_a_note_says_which_files_a_rank_has_written_and_comes_last(folder):
    _, second = parts(folder)
    assert not note_of(second.place.temporary, 1).exists()
    second.write(healthy=True)
    note = json.loads(note_of(second.place.temporary, 1).read_text())
    assert note["bad"] is None
    assert {*note["files"]} == {
        f"{part}/shard-00002-model-00001-of-00001.safetensors" for part in ("model", "training")
    }
    for name, entry in note["files"].items():
        assert (second.place.temporary / name).stat().st_size == entry["bytes"]


def test_each_attempt_begins_in_an_empty_folder_of_its_own(folder):
    first = begin(folder, 7, 0)
    (first / "model" / "late").write_text("of another attempt")
    assert begin(folder, 7, 1) != first
    assert [*(begin(folder, 7, 0) / "model").iterdir()] == []
    assert all(name.startswith(".") for name in left(folder)), "none of them goes by a checkpoint's name"
