"""A weight or moment that changes on one rank between two updates: all ranks withhold, and all go back."""

import json

import pytest

from tests.parallel.launches import on_demand
from tests.parallel.test_recheck import last_state
from tests.runs import TINY_GPT

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

RUN = [*TINY_GPT, "batch_size=4", "monitors=none", "checkpoint=off", "steps=6", "model.dropout=0.1"]
EVERY = [*RUN, "guard.checksum_every=1", "guard.snapshot_every=1", "guard.healthy_after=1", "parallel.compare=false"]
FAULT = ["faults=bitflip", "faults.bit=18", "faults.rank=1", "faults.at=[3]"]
CASES = {
    f"{parallel} {where}": {
        "overrides": [
            *(override for override in EVERY if parallel == "ddp" or "compare" not in override),
            f"parallel={parallel}",
            *([*FAULT, f"faults.where={where}"] if where != "none" else []),
        ]
    }
    for parallel in ("ddp", "fsdp")
    for where in ("none", "weight", "exp_avg_sq")
}


@pytest.fixture(scope="module")
def two(shared_place):
    return on_demand(shared_place / "state_two", 2, CASES, [[*CASES]])


@pytest.mark.beside
@pytest.mark.parametrize("where", ["weight", "exp_avg_sq"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_withhold_and_the_run_ends_as_without_the_change(two, shared_place, parallel, where):
    name = f"{parallel} {where}"
    faulty = [seen[name] for seen in two]
    assert [seen["error"] for seen in faulty] == [None, None], faulty[0]["message"]
    for seen in faulty:
        assert [reading["step"] for reading in seen["readings"] if not reading["applied"]] == [4]
        assert [each for each in seen["verdicts"] if each[1] != "apply"] == [[4, "restore", "state"]]
    assert [last_state(seen[f"{parallel} none"]) for seen in two] == [last_state(seen) for seen in faulty]
    (path,) = (shared_place / "state_two" / name / "incidents").glob("*/diagnosis.json")
    found = json.loads(path.read_text())
    assert (found["kind"], found["cause"], found["rank"]) == ("state", "corrupt_state", 1)
