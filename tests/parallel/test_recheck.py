"""Two ranks compute steps twice: each its own gradient, before it is averaged; the rank at fault is named."""

import json

import pytest

from stabletrain.tracking.metrics import read_jsonl
from tests.parallel.launches import on_demand
from tests.runs import TINY_GPT

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

STEPS = 6
RUN = [*TINY_GPT, "batch_size=4", "monitors=none", "checkpoint=off", f"steps={STEPS}", "model.dropout=0.1"]
EVERY = [*RUN, "guard.recheck_every=2", "guard.snapshot_every=1", "guard.healthy_after=1"]
FAULT = ["faults=gradient", "faults.value=3", "faults.rank=1", "faults.at=[3]"]
CASES = {
    "never": {"overrides": [*RUN, "parallel=ddp", "guard.recheck_every=0"]},
    "fault": {"overrides": [*EVERY, "parallel=ddp", *FAULT]},
    "accumulated": {"overrides": [*EVERY, "parallel=ddp", "grad_accum_steps=2", *FAULT]},
    **{
        part: {"overrides": [*RUN, f"parallel={kind}", "guard.recheck_every=4"], "broken": [part, 1]}
        for part, kind in (("second run", "ddp"), ("copied buckets", "ddp"), ("copied tensor", "fsdp"))
    },
    "sharded": {"overrides": [*RUN, "parallel=fsdp", "guard.recheck_every=1"]},
    "sharded never": {"overrides": [*RUN, "parallel=fsdp", "guard.recheck_every=0"]},
}


@pytest.fixture(scope="module")
def two(shared_place):
    return on_demand(shared_place / "recheck_two", 2, CASES)


def last_state(seen):
    return seen["states"][max(seen["states"], key=int)]


@pytest.mark.beside
@pytest.mark.parametrize("name", ["fault", "accumulated"])
def test_the_rank_whose_gradient_was_wrong_once_is_named_and_the_run_ends_as_without_it(two, shared_place, name):
    faulty = [seen[name] for seen in two]
    assert [seen["error"] for seen in faulty] == [None, None], faulty[0]["message"]
    withheld = [[reading["step"] for reading in seen["readings"] if not reading["applied"]] for seen in faulty]
    assert withheld == [[4], [4]]
    events = read_jsonl(shared_place / "recheck_two" / name / "events.jsonl")
    assert [event["event"] for event in events].count("restore") == 1
    (path,) = (shared_place / "recheck_two" / name / "incidents").glob("*/diagnosis.json")
    found = json.loads(path.read_text())
    assert (found["kind"], found["cause"], found["rank"]) == ("recheck", "hardware_fault", 1)
    assert "rank 1" in found["verdict"]
    assert "a third computation equals the second: the first was wrong" in found["evidence"]
    if name == "fault":
        assert [last_state(seen["never"]) for seen in two] == [last_state(seen) for seen in faulty]


def test_shards_compute_one_update_twice_and_change_no_bit(two):
    for seen in two:
        assert [seen[name]["error"] for name in ("sharded", "sharded never")] == [None, None], seen["sharded"][
            "message"
        ]
        assert [reading["recheck_update"] for reading in seen["sharded"]["readings"]] == [0.0] * STEPS
        assert last_state(seen["sharded"]) == last_state(seen["sharded never"])


@pytest.mark.parametrize("part", ["second run", "copied buckets", "copied tensor"])
def test_if_one_rank_has_too_little_memory_no_rank_repeats_anything_and_none_waits(two, shared_place, part):
    clean = "sharded never" if part == "copied tensor" else "never"
    number = "recheck_update" if part == "copied tensor" else "recheck"
    for seen in two:
        assert seen[part]["error"] is None, seen[part]["message"]
        assert [reading[number] for reading in seen[part]["readings"]] == [0.0, -1.0, 0.0, 0.0, 0.0, 0.0], (
            "the rehearsal ran out of memory, and step 4, which is due, is not repeated"
        )
        assert last_state(seen[part]) == last_state(seen[clean])
    events = read_jsonl(shared_place / "recheck_two" / part / "events.jsonl")
    assert [(event["step"], event["reason"]) for event in events if event["event"] == "recheck_off"] == [
        (2, "out of memory")
    ]
