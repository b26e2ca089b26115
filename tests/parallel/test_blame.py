"""Forensics on two ranks: one folder per incident, which names the culprit rank."""

import json

import pytest
import torch

from tests.parallel.launches import on_demand
from tests.parallel.test_one_rank_fault import seed_for
from tests.runs import TINY_GPT

pytestmark = pytest.mark.timeout(600)

RUN = [*TINY_GPT, "batch_size=4", "steps=6", "checkpoint=off", "monitors=none", "guard=skip", "warmup=none"]
AT = 3
KINDS = {
    "input": ("poison_input", [f"faults.seed={seed_for(torch.empty(4, 16), AT, 1)}"]),
    "label": ("bad_label", [f"faults.seed={seed_for(torch.empty(4, 16), AT, 1)}"]),
    "activation": ("hardware_fault", []),
}
CASES = {
    f"{parallel}-{kind}": {
        "overrides": [*RUN, f"parallel={parallel}", f"faults={kind}", f"faults.at=[{AT}]", "faults.rank=1", *more]
    }
    for parallel in ("ddp", "fsdp")
    for kind, (_, more) in KINDS.items()
}


@pytest.fixture(scope="module")
def seen(shared_place):
    """What each rank saw, and the place of the run folders."""
    place = shared_place / "blame"
    return on_demand(place, 2, CASES), place


@pytest.mark.slow(unless=lambda parallel, kind: (parallel, kind) == ("ddp", "input"))
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_guilty_rank_files_one_incident_that_names_it(seen, parallel, kind):
    (first, second), place = seen
    name = f"{parallel}-{kind}"
    assert not first[name]["error"], first[name]["message"]
    assert first[name]["weights"] == second[name]["weights"]
    (folder,) = (place / name / "incidents").iterdir()
    found = json.loads((folder / "diagnosis.json").read_text())
    assert (found["step"], found["rank"], found["cause"]) == (AT + 1, 1, KINDS[kind][0])
    events = [json.loads(line) for line in (place / name / "events.jsonl").read_text().splitlines()]
    assert [event["cause"] for event in events if event["event"] == "incident"] == [KINDS[kind][0]]
