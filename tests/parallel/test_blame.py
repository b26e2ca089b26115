"""Forensics on two ranks: one folder per incident, which names the rank whose own part was bad, and its numbers."""

import json
import math

import pytest
import torch

from tests.parallel.launches import on_demand
from tests.parallel.test_one_rank_fault import seed_for
from tests.runs import TINY_GPT

pytestmark = [pytest.mark.timeout(600), pytest.mark.beside]

RUN = [*TINY_GPT, "batch_size=4", "steps=6", "checkpoint=off", "monitors=none", "guard=skip", "warmup=none"]
AT = 3
CAUSES = {
    "input": "poison_input",
    "label": "bad_label",
    "activation": "hardware_fault",
    "gradient": "hardware_fault",
}
"""What each kind of fault is diagnosed as; a replay does not repeat a fault that was injected into the computation."""

DATA = ("input", "label")


def overrides(parallel, kind, rank):
    """A run in which one rank has one fault."""
    seed = [f"faults.seed={seed_for(torch.empty(4, 16), AT, rank)}"] if kind in DATA else []
    return [*RUN, f"parallel={parallel}", f"faults={kind}", f"faults.at=[{AT}]", f"faults.rank={rank}", *seed]


NAMED = [
    *(("ddp", "input", 0), ("ddp", "label", 1), ("ddp", "activation", 0), ("ddp", "gradient", 1)),
    *(("fsdp", "input", 1), ("fsdp", "label", 0), ("fsdp", "activation", 1), ("fsdp", "gradient", 0)),
]
"""Each kind of fault with ddp and with fsdp, and on either rank."""

CASES = {f"{parallel}-{kind}-{rank}": {"overrides": overrides(parallel, kind, rank)} for parallel, kind, rank in NAMED}
FP16 = ["precision=fp16", "precision.init_scale=8", "precision.min_scale=8"]
ACCUMULATED = [*overrides("ddp", "gradient", 1), *FP16, "grad_accum_steps=2"]
CASES["ddp-accumulated-1"] = {"overrides": ACCUMULATED}
CASES["ddp-chunks-1"] = {"overrides": [*overrides("ddp", "gradient", 1), "loss_chunk=7"]}
CASES["ddp-unused-1"] = {"overrides": [*overrides("ddp", "gradient", 1), "parallel.find_unused_parameters=true"]}
CASES |= {
    f"{parallel}-once-1": {"overrides": [*overrides(parallel, "gradient", 1), "faults.value=1e6"]}
    for parallel in ("ddp", "fsdp")
}
BURST = ["faults=learning_rate", "faults.at=[2]", "faults.factor=300", "guard.max_consecutive=1"]
UNEVEN = ["data._target_=tests.parallel.given.Uneven", "zloss=palm", "zloss.coefficient=0.1", "grad_accum_steps=2"]
ODD = ["model.n_head=1", "model.n_embd=17", "model.position=learned", "guard=rollback", "precision=fp32"]
"""Widths that two ranks cannot divide; snapshots, so that there is an older state."""
CASES |= {
    f"{parallel}-odd-1": {"overrides": [*overrides(parallel, "activation", 1), *ODD]} for parallel in ("ddp", "fsdp")
}
CASES |= {
    f"{parallel}-burst": {"overrides": [*RUN, *BURST, *UNEVEN, *FP16, f"parallel={parallel}"]}
    for parallel in ("ddp", "fsdp")
}


ESSENTIAL = (("ddp", "gradient", 1),)
TOGETHER = [[name for name in CASES if name != "-".join(map(str, ESSENTIAL[0]))]]


@pytest.fixture(scope="module")
def seen(shared_place):
    """What each rank saw, and the place of the run folders."""
    place = shared_place / "blame"
    return on_demand(place, 2, CASES, TOGETHER), place


def incident(seen, name):
    """The `diagnosis.json` and the report of the only incident of a run that went on to its end."""
    (first, second), place = seen
    assert first[name]["error"] == ("TrainingHalted" if "burst" in name else None), first[name]["message"]
    if "burst" not in name:
        assert first[name]["weights"] == second[name]["weights"]
        assert first[name]["step"] == 6
    (folder,) = (place / name / "incidents").iterdir()
    events = [json.loads(line) for line in (place / name / "events.jsonl").read_text().splitlines()]
    found = json.loads((folder / "diagnosis.json").read_text())
    assert [event["cause"] for event in events if event["event"] == "incident"] == [found["cause"]]
    return found, (folder / "report.md").read_text()


@pytest.mark.slow(unless=lambda parallel, kind, rank: (parallel, kind, rank) in ESSENTIAL)
@pytest.mark.parametrize(("parallel", "kind", "rank"), NAMED)
def test_the_incident_names_the_rank_whose_part_was_bad(seen, parallel, kind, rank):
    found, _ = incident(seen, f"{parallel}-{kind}-{rank}")
    assert (found["step"], found["rank"], found["cause"]) == (AT + 1, rank, CAUSES[kind])


@pytest.mark.slow(unless=lambda name: name == "ddp-gradient-1")
@pytest.mark.parametrize(
    "name",
    [
        *(f"ddp-{case}-1" for case in ("gradient", "accumulated", "chunks", "unused")),
        *("ddp-activation-0", "fsdp-activation-1"),
    ],
)
def test_a_replay_is_compared_with_the_numbers_of_its_own_rank(seen, name):
    """The mean over both ranks, 5.43, is not the loss of either."""
    found, page = incident(seen, name)
    part, same, rank = found["part"], found["replays"]["same"], int(name[-1])
    assert (part["rank"], same["bitwise_equal_to_reading"], same["finite"]) == (rank, False, True)
    assert found["reading"]["loss"] != pytest.approx(same["loss"], rel=1e-3)
    if "activation" in name:
        assert part["loss"] == "NaN"
    else:
        assert part["loss"] == pytest.approx(same["loss"], rel=1e-5)
        assert part["grad_norm"] == "NaN"
        assert f"| the step, rank {rank}'s part | **no** | {part['loss']:.6g} | nan | |" in page
    mine = f"loss {float(part['loss']):.6g}" + ("" if part["grad_norm"] is None else " and gradient norm nan")
    again = f"loss {same['loss']:.6g} and gradient norm {same['grad_norm']:.6g}"
    expected = f"a replay of rank {rank}'s part of the step gives {again}; in the step, it gave {mine}"
    assert found["verdict"] == expected


@pytest.mark.slow
def test_gathered_weights_are_those_of_whole_copies(seen):
    """All replays, of the present and of the older state, give with fsdp what they give with ddp."""
    ddp, fsdp = (incident(seen, f"{parallel}-odd-1")[0]["replays"] for parallel in ("ddp", "fsdp"))
    for variant, outcome in ddp.items():
        assert not outcome["not_run"]
        for number in ("loss", "grad_norm"):
            assert fsdp[variant][number] == pytest.approx(outcome[number], rel=1e-4), variant
    assert len({outcome["loss"] for outcome in ddp.values()}) == 3, "fp32 is the same"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_large_gradient_that_does_not_recur_is_no_bad_batch(seen, parallel):
    """With fsdp no rank is named: only the sum over the ranks is known, and its shards were finite."""
    found, _ = incident(seen, f"{parallel}-once-1")
    assert (found["kind"], found["cause"]) == ("spike", "hardware_fault")
    assert found["rank"] == (1 if parallel == "ddp" else None)
    if parallel == "ddp":
        assert found["part"]["grad_norm"] > 1e5
    else:
        assert "every rank's own loss was normal in the step and in a replay" in found["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_own_numbers_have_the_units_of_a_replay_whatever_the_scale_and_the_number_of_targets(seen, parallel):
    found, _ = incident(seen, f"{parallel}-burst")
    part, same = found["part"], found["replays"]["same"]
    assert found["kind"] == "spike"
    assert same["bitwise_equal_to_reading"] is None, "it agrees, but nothing is known about bits"
    assert part["loss"] == pytest.approx(same["loss"], rel=1e-5)
    assert found["reading"]["loss"] != pytest.approx(same["loss"], rel=1e-3)
    if parallel == "ddp":
        # in fp16, whose numbers are 1e-3 apart, and at another loss scale
        assert part["grad_norm"] == pytest.approx(same["grad_norm"], rel=5e-3)
        assert math.isfinite(part["grad_norm"])
    else:
        assert part["grad_norm"] is None
