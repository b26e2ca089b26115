"""If a rank fails while two explain an incident, both agree not to investigate it, and the run goes on."""

import itertools
import json

import pytest
import torch

from stabletrain.tracking.metrics import read_jsonl
from tests.once import once
from tests.parallel.launches import finish, on_demand, printed, start
from tests.parallel.test_one_rank_fault import seed_for
from tests.runs import ROOT, TINY_GPT

pytestmark = [pytest.mark.timeout(600), pytest.mark.beside]

AT = 3
RUN = [*TINY_GPT, "batch_size=4", "steps=6", "checkpoint=off", "monitors=none", "warmup=none", f"faults.at=[{AT}]"]
RUN += ["faults.rank=1", "log_every=1"]
LABEL = [*RUN, "faults=label", f"faults.seed={seed_for(torch.empty(4, 16), AT, 1)}"]
FAULTS = {"activation": [*RUN, "faults=activation"], "label": LABEL}

DECLINED = {
    "memory": "replays need the whole weights on every rank, ",
    "prepare": "MemoryError: no room for a model",
    "send": "RuntimeError: this shard cannot be read",
    "receive": "RuntimeError: this shard cannot be read",
    "make": "ValueError: no repro",
    "older": "RuntimeError: no snapshot",
    "send older": "RuntimeError: this shard cannot be read",
    "investigate": "RuntimeError: no findings",
    "diagnose": "RuntimeError: no diagnosis",
    "write": "TypeError: no JSON",
}
"""The reason that all ranks give when a part fails on one of them."""

ONLY_FSDP = ("memory", "prepare", "send", "receive", "send older")
"""Parts that are not needed if every rank has whole weights."""

BROKEN = [
    (parallel, part, rank)
    for parallel, part, rank in itertools.product(("fsdp", "ddp"), DECLINED, (0, 1))
    if (parallel == "fsdp" or part not in ONLY_FSDP) and (part, rank) != ("write", 0)  # rank 1 writes
]
FSDP_RANK = {"memory": 1, "prepare": 0, "send": 0, "receive": 1, "make": 1, "older": 0, "send older": 1}
FSDP_RANK |= {"investigate": 1, "diagnose": 0, "write": 1}
PAIRED = [each for each in BROKEN if (each[2] == FSDP_RANK[each[1]]) == (each[0] == "fsdp") or each[1] == "write"]
"""Each part fails with fsdp and with ddp, and on each rank; where only fsdp needs it, on one of them."""


def name_of(parallel, part, rank):
    return f"{parallel}-{part}-{rank}".replace(" ", "_")


CASES = {
    name_of(*each): {"overrides": [*FAULTS["activation"], f"parallel={each[0]}"], "broken": each[1:]} for each in BROKEN
}
MORE = {
    "whole": ([], FAULTS["activation"]),
    "off": (["forensics=off"], FAULTS["activation"]),
    "label": ([], FAULTS["label"]),
    "label_small": (["forensics.keep_state=false"], FAULTS["label"]),
    "twice": (["faults.at=[3,5]", "forensics.max_incidents=1"], FAULTS["activation"]),
}
for parallel, (case, (more, chosen)) in itertools.product(("fsdp", "ddp"), MORE.items()):
    if (parallel, case) != ("ddp", "twice"):  # ranks agree on the budget before they look at shards
        CASES[f"{parallel}-{case}"] = {"overrides": [*chosen, *more, f"parallel={parallel}"]}
for part, rank in (("replay", 1), ("replay", 0), ("disk", 1), ("budget", 0)):
    CASES[f"fsdp-{part}-{rank}"] = {"overrides": [*FAULTS["activation"], "parallel=fsdp"], "broken": [part, rank]}
CASES["fsdp-label_memory"] = {"overrides": CASES["fsdp-label_small"]["overrides"], "broken": ["memory", 1]}
CASES["fsdp-samples-1"] = {"overrides": [*FAULTS["label"], "parallel=fsdp"], "broken": ["samples", 1]}

ESSENTIAL = (("fsdp", "receive", 1),)
OTHERS = [name for name in CASES if name not in {name_of(*case) for case in BROKEN}]
TOGETHER = [[*(name_of(*case) for case in PAIRED if case not in ESSENTIAL), *OTHERS]]


@pytest.fixture(scope="module")
def place(shared_place):
    return shared_place / "explaining"


@pytest.fixture(scope="module")
def two(place):
    return on_demand(place, 2, CASES, TOGETHER)


def events(place, name, kind):
    return [event for event in read_jsonl(place / name / "events.jsonl") if event["event"] == kind]


def went_on(two, name):
    """What both ranks saw of a run that ended normally, in the same state on both."""
    both = [seen[name] for seen in two]
    assert [seen["error"] for seen in both] == [None, None], both[0]["message"]
    assert both[0]["verdicts"] == both[1]["verdicts"]
    assert both[0]["weights"] == both[1]["weights"]
    assert [seen["step"] for seen in both] == [6, 6]
    return both


@pytest.mark.slow(unless=lambda parallel, part, rank: (parallel, part, rank) in ESSENTIAL)
@pytest.mark.parametrize(("parallel", "part", "rank"), PAIRED)
def test_an_error_on_one_rank_leaves_the_incident_and_the_run_goes_on(two, place, parallel, part, rank):
    name = name_of(parallel, part, rank)
    both = went_on(two, name)
    (event,) = events(place, name, "not_investigated")
    assert event["step"] == AT + 1
    assert event["reason"].startswith(f"rank {rank}: {DECLINED[part]}")
    assert not events(place, name, "incident")
    out = [printed(place, name, number) for number in (0, 1)]
    line = f"step {AT + 1}: this incident is not investigated: {event['reason']}"
    assert [text.count(line) for text in out] == [1, 0], "one line, of the main process"
    assert both[0]["calls"] == both[1]["calls"], "the ranks gather together or not at all"
    if part in ("memory", "prepare", "make"):
        assert not both[0]["calls"], "the ranks agree before anything is gathered"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_explaining_or_failing_to_changes_no_bit(two, parallel):
    off = went_on(two, f"{parallel}-off")[0]
    for case in ("whole", f"investigate-{1 if parallel == 'fsdp' else 0}", f"make-{1 if parallel == 'fsdp' else 0}"):
        assert went_on(two, f"{parallel}-{case}")[0]["states"] == off["states"]


@pytest.mark.slow
def test_the_older_state_is_gathered_once_and_no_shard_returns_to_its_device(two, place):
    for seen in went_on(two, "fsdp-whole"):
        assert seen["calls"] == {"gathers": 2, "older": 1}
    (event,) = events(place, "fsdp-whole", "incident")
    assert event["cause"] == "hardware_fault"


@pytest.mark.slow
def test_bad_samples_need_no_older_state_and_without_a_state_to_keep_no_weights(two, place):
    assert [seen["calls"] for seen in went_on(two, "fsdp-label")] == [{"gathers": 1}] * 2
    assert [seen["calls"] for seen in went_on(two, "fsdp-label_small")] == [{}] * 2
    for name in ("fsdp-label", "fsdp-label_small", "fsdp-label_memory", "ddp-label", "ddp-label_small"):
        went_on(two, name)
        (event,) = events(place, name, "incident")
        assert event["cause"] == "bad_label"
        state = place / name / event["path"] / "state.safetensors"
        assert state.exists() == name.endswith("label")


@pytest.mark.slow
def test_a_replay_that_raises_is_reported_and_the_incident_is_filed(two, place):
    """The rank whose replays fail is named if its own numbers were bad; the other rank's replays do not matter."""
    for rank in (0, 1):
        name = f"fsdp-replay-{rank}"
        went_on(two, name)
        (event,) = events(place, name, "incident")
        page = (place / name / event["path"] / "report.md").read_text()
        assert ("not run: RuntimeError: no replay" in page) == (rank == 1)


@pytest.mark.slow
def test_a_full_disk_costs_the_folder_and_not_the_cause(two, place):
    went_on(two, "fsdp-disk-1")
    (event,) = events(place, "fsdp-disk-1", "incident")
    assert (event["cause"], event["path"]) == ("hardware_fault", None)


@pytest.mark.slow
def test_a_folder_that_cannot_be_counted_declines(two, place):
    went_on(two, "fsdp-budget-0")
    (event,) = events(place, "fsdp-budget-0", "not_investigated")
    assert event["reason"] == "rank 0: OSError: [Errno 116] Stale file handle"


@pytest.mark.slow
def test_a_batch_whose_samples_cannot_be_read_is_skipped_as_any_other(two, place):
    went_on(two, "fsdp-samples-1")
    assert len(events(place, "fsdp-samples-1", "skip")) == 1


@pytest.mark.slow
def test_incidents_past_the_budget_are_counted_only(two, place):
    went_on(two, "fsdp-twice")
    assert len(events(place, "fsdp-twice", "incident")) == 1
    assert not events(place, "fsdp-twice", "not_investigated")


PARTS = (("prepare", 0), ("receive", 1))


@pytest.fixture(scope="module")
def of_torchrun(tmp_path_factory):
    """Folder of runs on ranks that torchrun started, of which one is killed in the last run; `end` says how they ended.

    A launch by torchrun takes longer than all its runs.
    """
    killed = {"overrides": [*FAULTS["activation"], "parallel=fsdp"], "broken": ["killed", 1]}
    names = [name_of("fsdp", *each) for each in PARTS]

    def make(place):
        place.mkdir()
        (place / "cases.json").write_text(json.dumps({**{name: CASES[name] for name in names}, "killed": killed}))
        done = finish(start(2, "-m", "tests.parallel.worker", str(place), cwd=ROOT))
        (place / "end").write_text(json.dumps([done.returncode, done.stderr[-3000:]]))

    return once(tmp_path_factory, "explaining-torchrun", make)


@pytest.mark.slow
def test_ranks_that_torchrun_started_go_on_too(of_torchrun):
    seen = [json.loads((of_torchrun / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for part, rank in PARTS:
        name = name_of("fsdp", part, rank)
        assert name in seen[0], (of_torchrun / "end").read_text()
        went_on(seen, name)
        (event,) = events(of_torchrun, name, "not_investigated")
        assert event["reason"].startswith(f"rank {rank}: {DECLINED[part]}")


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_explains_is_lost_as_at_any_other_time(of_torchrun):
    """Only an error is agreed on; without its shards the run cannot continue."""
    returncode, _ = json.loads((of_torchrun / "end").read_text())
    assert returncode != 0
    record = json.loads((of_torchrun / "killed" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "another rank no longer responds" in record["reason"], "train.py would know its process"
