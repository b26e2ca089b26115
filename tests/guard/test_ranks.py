"""Checks the guard on two ranks of DDP and FSDP2: one verdict, unchanged states, one folder that names the rank."""

import itertools
import json

import pytest

from stabletrain.guard.whole_weights import NOT_TRIED
from stabletrain.records import Reading
from tests.guard.worker import BAD, CASES, STEPS
from tests.parallel.launches import alone, forked
from tests.runs import ROOT

KINDS = ["ddp", "fsdp"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, worker_id):
    """Where the loops ran, once for all test processes."""
    root = tmp_path_factory.getbasetemp()
    found = (root if worker_id == "master" else root.parent) / "guarded_ranks"
    found.mkdir(exist_ok=True)
    with alone(found / "lock"):
        if not (found / "done").exists():
            forked(2, "-m", "tests.guard.worker", str(found), cwd=ROOT, logs=found)
            (found / "done").touch()
    return found


@pytest.fixture(scope="module")
def ranks(place):
    """What each rank saw."""
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(2)]


APPLIED = Reading._fields.index("applied")
"""Place of `applied` in a reading."""

WITHHELD = [name for name in CASES if name not in ("plain", "clipped")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_read_the_same_numbers_and_reach_the_same_verdict(ranks, kind, name):
    one, other = (seen[f"{kind} {name}"] for seen in ranks)
    assert one["readings"] == other["readings"]
    applied = [reading[APPLIED] == "True" for reading in one["readings"]]
    assert applied == [not (name in WITHHELD and step == BAD) for step in range(STEPS)]
    assert one["rolled_back"] == other["rolled_back"]
    assert one["incidents"] == other["incidents"] == (["step-00000006"] if name in WITHHELD else [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_a_withheld_step_changes_no_bit_on_any_rank(ranks, kind, name):
    for seen in ranks:
        hashes = seen[f"{kind} {name}"]["hashes"]
        if name == "rollback":
            assert hashes[BAD + 1] == hashes[4], "back to the snapshot after step 4"
        elif name == "damaged":
            assert hashes[BAD + 1] == hashes[2], "that after step 4 is damaged on one rank: no rank uses it"
        else:
            changed = [a != b for a, b in itertools.pairwise(hashes)]
            assert changed == [not (name in WITHHELD and step == BAD) for step in range(STEPS)]


@pytest.mark.parametrize("name", CASES)
def test_sharded_weights_train_as_whole_ones(ranks, name):
    for one, other in zip(ranks[0][f"ddp {name}"]["readings"], ranks[0][f"fsdp {name}"]["readings"], strict=True):
        for a, b in zip(one, other, strict=True):
            assert a == b or float(a) == pytest.approx(float(b), rel=1e-4)


@pytest.mark.parametrize("formats", ["fp32", "bf16"])
def test_one_rank_alone_computes_with_whole_weights_what_fsdp_computes(ranks, formats):
    for seen in (rank[f"whole {formats}"] for rank in ranks):
        assert seen["alone"] == seen["together"]
        assert seen["gradients"] == [True] * 5
        assert seen["restored"]
        assert seen["why_not"] == NOT_TRIED, "FSDP2 had a hook that is not known"
    assert ranks[0]["whole fp32"]["alone"] != ranks[0]["whole bf16"]["alone"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "cause", "op"),
    [
        ("input", "poison_input", None),
        ("operation", "unsafe_op", "aten.div"),
        ("backward", "unsafe_op", "aten.div"),
        ("update", "unsafe_optimizer", "aten.div"),
    ],
)
def test_the_folder_names_the_rank_and_the_operation(place, kind, name, cause, op):
    record = json.loads((place / f"{kind}-{name}" / "step-00000006" / "diagnosis.json").read_text())
    assert (record["cause"], record["rank"]) == (cause, 1)
    if op is None:
        assert [sample["index"] for sample in record["samples"]] == [3]
    else:
        assert record["origin"]["op"] == op
        assert "worker.py" in record["origin"]["source"]
    if op is not None:
        assert [sample["index"] for sample in record["samples"]] == ([] if name == "update" else [3])
        assert not any("culprit samples" in each for each in record["not_looked_at"])
