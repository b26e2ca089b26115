"""What the records of PyTorch's flight recorder show: in which collective ranks wait, and which rank never came."""

import json
import os
import pickle

import pytest
import torch
from torch import nn

from stabletrain.parallel import collectives
from stabletrain.parallel.collectives import (
    FILE_VARIABLES,
    Names,
    Sharded,
    explanation,
    loaded,
    read,
    record_to,
    remove_if_empty,
)
from stabletrain.parallel.ranks import Ranks

BLOCK, ROOT = 100, 7
NAMES = Names([Sharded("", ROOT, 4), *(Sharded(f"blocks.{n}", BLOCK, 4) for n in range(3))])
FORWARD = [{"name": "unshard", "filename": "f.py", "line": 1}, {"name": "pre_forward", "filename": "f.py", "line": 2}]
BACKWARD = [{"name": "unshard", "filename": "f.py", "line": 1}, {"name": "pre_backward", "filename": "f.py", "line": 2}]

GATHER, SCATTER = "_all_gather_base", "_reduce_scatter_base"
STEP = [(GATHER, ROOT, FORWARD), *[(GATHER, BLOCK, FORWARD)] * 3]
for _ in range(3):
    STEP += [(GATHER, BLOCK, BACKWARD), (SCATTER, BLOCK * 4, BACKWARD)]
"""The calls of a step with three blocks: operation, numbers that a rank contributes, and Python's frames."""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Where the records lie."""
    for name in (*FILE_VARIABLES, *collectives.SIZE_VARIABLES, *collectives.DEFAULTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(collectives, "_CHOSEN", [])
    monkeypatch.setattr(collectives, "_NAMES", [NAMES])
    monkeypatch.setenv(FILE_VARIABLES[0], f"{tmp_path}/rank-")
    return tmp_path


def dump(calls, done, backend="nccl", group="0", members=range(4), began=0):
    """Returns a record of version 2.x: the calls, of which so many are done."""
    entries = [
        {
            "frames": frames,
            "record_id": number,
            "pg_id": 0,
            "process_group": (group, "default_pg"),
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": f"{backend}:{operation}",
            "time_created_ns": began + number,
            "input_sizes": [[size]],
            "input_dtypes": ["Float"],
            "output_sizes": [[size]],
            "output_dtypes": ["Float"],
            "state": "completed" if number < done and backend == "nccl" else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": number < done,
            "timeout_ms": 900000,
            "is_p2p": False,
        }
        for number, (operation, size, frames) in enumerate(calls)
    ]
    ranks = {group: {"name": group, "desc": "", "ranks": str([*members])}}
    return {"version": "2.10", "pg_config": ranks, "pg_status": {}, "entries": entries}


def leave(place, rank, *dumps, form="pickle"):
    """Writes a rank's record, as PyTorch pickles it or as JSON."""
    if form == "pickle":
        (place / f"rank-{rank}").write_bytes(pickle.dumps(dumps[0], 2))
    else:
        (place / f"rank-{rank}.json").write_text(json.dumps(dumps if len(dumps) > 1 else dumps[0]))


def shown(rank=0, count=4):
    return explanation(Ranks(rank, count, rank, launched=True), 0.0)


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_the_rank_that_never_came_is_named_with_the_collective_and_its_module(place, form):
    for rank in (0, 1, 3):
        leave(place, rank, dump(STEP[:9], done=6), form=form)  # their hosts have gone on
    leave(place, 2, dump(STEP[:6], done=6), form=form)
    assert shown() == (
        "ranks 0-1, 3 wait in all_gather of blocks.1 (collective 7); rank 2 never came: its last was reduce_scatter of "
        "blocks.2 (collective 6)"
    )


WHERE = {
    11: "all_gather of the modules outside of blocks",
    2: "all_gather of blocks.0",
    4: "all_gather of blocks.2",
    5: "all_gather of blocks.2",
    8: "reduce_scatter of blocks.1",
    9: "all_gather of blocks.0",
    10: "reduce_scatter of blocks.0",
    12: "all_gather of blocks.0",
}


@pytest.mark.parametrize("seq", WHERE)
def test_blocks_of_one_size_are_told_apart_by_their_place_in_the_step(place, seq):
    for rank in range(4):
        calls = (STEP * 2)[: seq - (rank == 3)]
        leave(place, rank, dump(calls, done=seq - 1))
    assert shown().startswith(f"ranks 0-2 wait in {WHERE[seq]} (collective {seq}); rank 3 never came")


def test_without_frames_the_blocks_of_that_size_are_named(place):
    calls = [(operation, size, []) for operation, size, _ in STEP]
    for rank in range(2):
        leave(place, rank, dump(calls[: 3 - rank], done=2, members=range(2)))
    assert shown(count=2).startswith("rank 0 waits in all_gather of one of blocks.0 to blocks.2 (collective 3); rank 1")


def test_the_gradients_that_copies_average_are_named_by_their_module(place):
    calls = [("all_reduce", ROOT, []), ("all_reduce", BLOCK, [])]
    for rank in range(2):
        leave(place, rank, dump(calls[: 2 - rank], 1, members=range(2)))
    last = "its last was all_reduce of the modules outside of blocks (collective 1)"
    expected = f"rank 0 waits in all_reduce of one of blocks.0 to blocks.2 (collective 2); rank 1 never came: {last}"
    assert shown(count=2) == expected


def test_a_size_that_fits_no_module_leaves_the_collective_alone(place):
    for rank in range(2):
        leave(place, rank, dump([("all_reduce", 3, []), ("broadcast", 5, [])][: 2 - rank], 1, members=range(2)))
    assert shown(count=2) == (
        "rank 0 waits in broadcast (collective 2); rank 1 never came: its last was all_reduce (collective 1)"
    )


def test_a_bucket_is_named_by_its_first_and_last_parameter():
    names = Names(parameters=[("a", 3), ("b", 40), ("c", 500), ("d", 3)])
    assert [names.of_run(size) for size in (540, 40, 3, 7, 546)] == [" of b to c", " of b", "", "", " of a to d"]


def test_ranks_in_different_collectives_are_told(place):
    leave(place, 0, dump([("all_reduce", 3, [])], 0, members=range(2)))
    leave(place, 1, dump([("broadcast", 3, [])], 0, members=range(2)))
    assert shown(count=2) == "the ranks do not agree on collective 1: rank 0 in all_reduce and rank 1 in broadcast"


def test_if_all_have_come_the_connection_has_failed(place):
    for rank in range(2):
        leave(place, rank, dump(STEP[: 5 + rank], done=1, members=range(2)))
    assert shown(count=2) == (
        "ranks 0-1 wait in all_gather of blocks.0 (collective 2); all have come, so the connection "
        "between them has failed"
    )


def test_a_rank_that_waits_elsewhere_is_no_cause(place):
    """Rank 1 never came to group 0, because it waits in group 1 for rank 2."""
    leave(place, 0, dump([("all_reduce", 3, [])] * 2, 1, members=(0, 1)), form="json")
    of_one = dump([("broadcast", 3, [])], 0, group="1", members=(1, 2))
    leave(place, 1, dump([("all_reduce", 3, [])], 1, members=(0, 1)), of_one, form="json")
    leave(
        place,
        2,
        dump([], 0, group="1", members=(1, 2)),
        dump([("barrier", 1, [])], 1, group="2", members=(2,)),
        form="json",
    )
    assert shown(count=3).startswith("rank 1 waits in broadcast (collective 1); rank 2 never came")


def test_what_failed_over_gloo_is_the_newest_collective_of_the_rank(place):
    """gloo's record says of a collective that has failed that it has ended."""
    older = dump([("all_reduce", 3, [])] * 5, 5, "gloo", members=range(3))
    newer = dump([("all_gather", 9, [])] * 2, 2, "gloo", group="1", members=range(3), began=100)
    for rank in range(2):
        leave(place, rank, older, newer, form="json")
    assert shown(count=3) == "ranks 0-1 wait in all_gather (collective 2); rank 2 has left no record"


def test_who_came_late_is_told(place):
    calls = [("all_reduce", 3, [])] * 5
    for rank in range(3):
        leave(place, rank, dump(calls, 5, "gloo", members=range(3), began=8 * 10**9 * (rank == 1)))
    assert shown(count=3) == "ranks 0, 2 waited in all_reduce (collective 5); rank 1 came 8 s later"


def test_without_records_or_with_damaged_ones_nothing_is_said(place, monkeypatch):
    assert shown() == ""
    leave(place, 0, {"entries": [{"no": "collective"}]})
    assert shown() == ""
    leave(place, 0, dump(STEP, done=len(STEP)))
    assert shown() == "", "all is done"
    for content in (b"", b"\x80\x02", b"[1", b"[1]", b"{}", pickle.dumps([3])):
        (place / "rank-0").write_bytes(content)
        assert shown() == ""
    monkeypatch.delenv(FILE_VARIABLES[0])
    assert shown() == ""


class Harm:
    """Does something when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_a_record_that_would_call_something_is_not_read(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "rank-0").write_bytes(pickle.dumps({"entries": [Harm()]}))
    assert read(0) is None
    assert not (place / "harm").exists()
    with pytest.raises(ValueError, match="no record"):
        loaded(pickle.dumps(os.mkdir))


def test_records_go_to_the_run_folder_unless_the_user_says_where(place, monkeypatch):
    ranks = Ranks(1, 2, 1, launched=True, restarts=2)
    record_to(place / "run", ranks, cards=True)
    assert os.environ[FILE_VARIABLES[0]] == f"{place}/rank-", "the user has set it"
    monkeypatch.delenv(FILE_VARIABLES[0])
    record_to(place / "one", Ranks(), cards=True)
    assert FILE_VARIABLES[0] not in os.environ, "one process waits for no other"
    old = place / "run" / "collectives" / "start-3-rank-1"
    old.parent.mkdir(parents=True)
    old.write_text("of an earlier start")
    record_to(place / "run", ranks, cards=True)
    assert os.environ[FILE_VARIABLES[0]] == str(old)[:-1]
    assert not old.exists()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    remove_if_empty()
    assert not old.parent.exists()
    record_to(place / "next", ranks, cards=False)
    assert os.environ[FILE_VARIABLES[0]] == f"{place}/next/collectives/start-3-rank-", "of the next run of a sweep"
    assert not (place / "next").exists(), "gloo writes nothing by itself"


def test_the_record_of_gloo_is_written_and_read(place, group_of_one):
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3, 4))
    collectives.write(Ranks(0, 2, launched=True))
    record = read(0)
    if record is None:
        pytest.skip("this version of PyTorch does not record what gloo does")
    calls = record.entries["gloo", "0"]
    assert (calls[max(calls)].operation, calls[max(calls)].size) == ("all_reduce", 12)
    assert record.members["0"] == {0}
    assert [file.name for file in place.iterdir()] == ["rank-0.json"]


def test_a_record_begins_with_the_last_group_of_a_name(place):
    earlier, later = dump(STEP, 4), dump(STEP[:2], 2)
    found = collectives.parsed([{"entries": [*earlier["entries"], *later["entries"]]}])
    assert found.entries == collectives.parsed([later]).entries


def test_weights_that_are_gathered_in_several_precisions_are_known_by_their_bytes():
    narrow, wide = torch.bfloat16, torch.float32
    assert collectives.sharded("a", [(30, narrow), (12, narrow)], 2) == Sharded("a", 42, 2, 42)
    mixed = collectives.sharded("a", [(30, narrow), (12, wide)], 2)
    assert mixed == Sharded("a", 42, 2, 108)
    entry = next(iter(collectives.parsed([dump([(GATHER, 108, FORWARD)], 1)]).entries["nccl", "0"].values()))
    assert [collectives.fits(entry._replace(size=size), mixed) for size in (108, 42)] == [True, False]
    assert [collectives.fits(entry._replace(operation="all_reduce", size=size), mixed) for size in (42, 84)] == [
        True
    ] * 2


def test_a_model_that_is_not_sharded_is_named_by_its_parameters():
    collectives.name_collectives(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    assert [Names([], [("0.weight", 6), ("0.bias", 3), ("1.weight", 3), ("1.bias", 1)])] == collectives._NAMES
