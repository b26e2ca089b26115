"""Law 11 on two ranks: an update that is not finite on one of them is undone on both."""

import json

import pytest

from stabletrain.tracking.metrics import read_jsonl
from tests.parallel.launches import on_demand
from tests.runs import TINY_GPT

RUN = [*TINY_GPT, "batch_size=4", "steps=7", "eval_every=7", "checkpoint=off", "monitors=none", "warmup=none"]
FAULT = ["faults=optimizer", "faults.at=[3]", "faults.rank=1"]
CASES = {
    f"{parallel} {name}": {"overrides": [*RUN, f"parallel={parallel}", *more]}
    for parallel in ("ddp", "fsdp")
    for name, more in {
        "clean": ["guard=skip", "forensics=off"],
        "rollback": ["guard=rollback", *FAULT],
        "skip": ["guard=skip", *FAULT],
    }.items()
}


@pytest.fixture(scope="module")
def two(shared_place):
    return on_demand(shared_place / "bad_update_two", 2, CASES, [[*CASES]])


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.parametrize("guard", ["rollback", "skip"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_bad_update_of_one_rank_leaves_the_run_as_one_without_it(two, shared_place, parallel, guard):
    name = f"{parallel} {guard}"
    for seen in two:
        assert seen[name]["error"] is None, seen[name]["message"]
        assert seen[name]["weights"] == seen[f"{parallel} clean"]["weights"]
        assert (seen[name]["machine_faults"], sum(seen[name]["skips"].values())) == (1, 0)
    events = [event["event"] for event in read_jsonl(shared_place / "bad_update_two" / name / "events.jsonl")]
    assert events.count("restore") == 1
    (path,) = (shared_place / "bad_update_two" / name / "incidents").glob("*/diagnosis.json")
    found = json.loads(path.read_text())
    assert (found["kind"], found["cause"], found["rank"]) == ("update", "hardware_fault", 1)
