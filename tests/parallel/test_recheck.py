"""Two ranks compute steps twice: each its own gradient, before it is averaged; the rank at fault is named."""

import json
import platform

import pytest

from stabletrain.tracking.metrics import read_jsonl
from tests.parallel.launches import on_demand
from tests.runs import TINY_GPT, TINY_RESNET

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

STEPS = 6
RUN = [*TINY_GPT, "batch_size=4", "monitors=none", "checkpoint=off", f"steps={STEPS}", "model.dropout=0.1"]
EVERY = [*RUN, "guard.recheck_every=2", "guard.snapshot_every=1", "guard.healthy_after=1"]
FAULT = ["faults=gradient", "faults.value=3", "faults.rank=1", "faults.at=[3]"]
ACROSS = [*RUN, "guard=skip", "guard.recheck_across=ranks"]
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
    **{
        f"{name} {kind}": {"overrides": [*RUN, "guard=skip", "grad_accum_steps=2", f"parallel={kind}", *more]}
        for kind in ("ddp", "fsdp")
        for name, more in {
            "across parts": ["guard.recheck_every=1", "guard.recheck_across=ranks"],
            "plain parts": ["guard.recheck_every=0", "guard.recheck_across=none"],
        }.items()
    },
    "across images": {
        "overrides": [
            *TINY_RESNET,
            *("model.depth=8", "monitors=none", "checkpoint=off", "steps=3", "guard=skip", "parallel=ddp"),
            *("guard.recheck_every=1", "guard.recheck_across=ranks"),
        ]
    },
    "two suspects": {"overrides": [*ACROSS, "parallel=ddp", "guard.recheck_every=2"], "wrong": [3, 1]},
    "unknown": {"overrides": [*ACROSS, "parallel=ddp", "guard.recheck_every=2"], "wrong": [0, 1]},
    "unlike": {"overrides": [*ACROSS, "parallel=ddp", "guard.recheck_every=2"], "broken": ["machine", 1]},
}
OF_FOUR = {
    f"wrong {kind}": {"overrides": [*ACROSS, f"parallel={kind}", "guard.recheck_every=2"], "wrong": [tick, 2]}
    for kind, tick in (("ddp", 0), ("fsdp", 3))
}
"""A fault that repeats on its rank, from the start or after a step in which all agreed; only another rank shows it."""


@pytest.fixture(scope="module")
def two(shared_place):
    return on_demand(shared_place / "recheck_two", 2, CASES, [list(CASES)])


@pytest.fixture(scope="module")
def four(shared_place):
    return on_demand(shared_place / "recheck_four", 4, OF_FOUR, [list(OF_FOUR)])


def incidents(place):
    return [json.loads(path.read_text()) for path in sorted(place.glob("incidents/*/diagnosis.json"))]


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


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_get_equal_bits_from_the_same_micro_batch_and_change_none(two, shared_place, kind):
    """Of a step in parts; in one part, images agree with ddp, and the four ranks with fsdp before one of them fails."""
    compared, plain = f"across parts {kind}", f"plain parts {kind}"
    for seen in two:
        assert [seen[name]["error"] for name in (compared, plain)] == [None, None], seen[compared]["message"]
        assert [reading["recheck"] for reading in seen[compared]["readings"]] == [0.0] * STEPS
        assert last_state(seen[compared]) == last_state(seen[plain])
        assert "'neighbour': {'varies': False, 'agreed': 6" in seen[compared]["parts"]["guard"]
    events = [each["event"] for each in read_jsonl(shared_place / "recheck_two" / compared / "events.jsonl")]
    assert not [each for each in events if each.startswith("recheck")]


def test_ranks_agree_on_images_and_buffers_too(two):
    for seen in two:
        assert seen["across images"]["error"] is None, seen["across images"]["message"]
        assert [reading["recheck"] for reading in seen["across images"]["readings"]] == [0.0] * 3
        assert "'neighbour': {'varies': False, 'agreed': 3" in seen["across images"]["parts"]["guard"]


@pytest.mark.beside
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_always_computes_the_same_wrong_bit_is_named_with_its_host(four, shared_place, kind):
    assert [seen[f"wrong {kind}"]["error"] for seen in four] == [None] * 4, four[0][f"wrong {kind}"]["message"]
    found = incidents(shared_place / "recheck_four" / f"wrong {kind}")
    assert {(each["kind"], each["cause"], each["rank"]) for each in found} == {("recheck", "hardware_fault", 2)}
    assert f"device cpu (cpu), host {platform.node()}, rank 2" in found[0]["verdict"]
    assert "ranks 1 and 2 and on ranks 2 and 3" in found[0]["verdict"]
    assert f"nodename={platform.node()} state=drain" in found[0]["fix"][0]
    for seen in four:
        withheld = [each["step"] for each in seen[f"wrong {kind}"]["readings"] if not each["applied"]]
        assert withheld[0] == (2 if kind == "ddp" else 4)


@pytest.mark.beside
def test_of_two_ranks_both_are_suspects_and_none_is_named(two, shared_place):
    assert [seen["two suspects"]["error"] for seen in two] == [None, None], two[0]["two suspects"]["message"]
    (found, *_) = incidents(shared_place / "recheck_two" / "two suspects")
    assert (found["kind"], found["cause"], found.get("rank")) == ("recheck", "hardware_fault", None)
    assert "it is not known which of them" in found["verdict"]
    assert all(f"rank {rank}" in found["verdict"] for rank in (0, 1))


def test_two_ranks_that_never_agreed_and_unlike_machines_are_not_compared_any_more(two, shared_place):
    for name, event in (("unknown", "recheck_varies"), ("unlike", "recheck_across_off")):
        assert [seen[name]["error"] for seen in two] == [None, None]
        events = [each["event"] for each in read_jsonl(shared_place / "recheck_two" / name / "events.jsonl")]
        assert events.count(event) == 1
        assert "incident" not in events
