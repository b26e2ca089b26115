"""`guard.keep=all_but_guilty` on two ranks, one of which has the guilty sample: both apply the rest of the step."""

import math

import pytest
import torch

from stabletrain.tracking.metrics import read_jsonl
from tests.parallel.launches import on_demand
from tests.parallel.test_one_rank_fault import seed_for
from tests.parallel.worker import numbers, perform
from tests.runs import TINY_GPT, TINY_RESNET

pytestmark = [pytest.mark.timeout(600), pytest.mark.beside]

BAD, STEPS = 2, 5
ALWAYS = ["checkpoint=off", "monitors=none", "guard=skip", "guard.keep=all_but_guilty", f"steps={STEPS}"]
ALWAYS += ["schedule=constant", "warmup=none", "precision=fp32", "log_every=1"]
GPT = [*TINY_GPT, *ALWAYS, "data._target_=tests.parallel.given.Uneven", "batch_size=8"]
RESNET = [*TINY_RESNET, *ALWAYS, "model.depth=8", "batch_size=8"]
LABEL = ["faults=label", f"faults.at=[{BAD}]", f"faults.seed={seed_for(torch.empty(8, 16), BAD, 1)}"]
PIXEL = ["faults=input", "faults.value=1e6", f"faults.at=[{BAD}]"]
PIXEL += [f"faults.seed={seed_for(torch.empty(8, 1, 8, 8), BAD, 1)}"]

CASES = {
    "ddp label": [*GPT, *LABEL, "parallel=ddp"],
    "ddp accumulated": [*GPT, *LABEL, "parallel=ddp", "grad_accum_steps=2"],
    "ddp pixel": [*RESNET, *PIXEL, "parallel=ddp"],
    "fsdp accumulated": [*GPT, *LABEL, "parallel=fsdp", "grad_accum_steps=2"],
    "fsdp pixel": [*RESNET, *PIXEL, "parallel=fsdp"],
    "ddp only sample": [*GPT, *LABEL, "parallel=ddp", "grad_accum_steps=4"],
}
"""A bad label is named by its value; a bright pixel is found by a search."""

ESSENTIAL = ("ddp accumulated",)


@pytest.fixture(scope="module")
def two(shared_place):
    cases = {name: {"overrides": case} for name, case in CASES.items()}
    return on_demand(shared_place / "keep_two", 2, cases, [[name for name in CASES if name not in ESSENTIAL]])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return perform(tmp_path_factory.mktemp("alone"), "one", {"overrides": [*GPT, *LABEL]})


@pytest.fixture(params=CASES)
def both(request, two):
    found = [seen[request.param] for seen in two]
    assert [seen["error"] for seen in found] == [None, None], found[0]["message"]
    return request.param, found


@pytest.mark.slow(unless=lambda both: both in ESSENTIAL)
def test_both_ranks_apply_the_rest_of_the_step(both):
    name, (first, second) = both
    assert str(first["readings"]) == str(second["readings"])
    assert first["weights"] == second["weights"] or "fsdp" in name, "of FSDP each rank has its shards"
    assert first["parts"] == second["parts"]
    applied = [reading["applied"] for reading in first["readings"]]
    # Samples that fill a micro-batch of their rank cannot be left out: the other rank would wait for it.
    again = [] if name == "ddp only sample" else [True]
    assert applied == [True] * BAD + [False, *again] + [True] * (STEPS - BAD - 1)
    assert sum(first["skips"].values()) == (not again)


@pytest.mark.slow(unless=lambda both: both in ESSENTIAL)
def test_the_event_names_the_sample(both, shared_place):
    name, _ = both
    lines = read_jsonl(shared_place / "keep_two" / name / "events.jsonl")
    named = [line["left_out"] for line in lines if line["event"] == "restore"]
    if name != "ddp only sample":
        ((sample,),) = named
        assert (sample["rank"], sample["index"] // 4) == (1, 1)


@pytest.mark.slow(unless=lambda name: name in ESSENTIAL)
@pytest.mark.parametrize("name", ["ddp label", "ddp accumulated", "fsdp accumulated"])
def test_the_loss_is_divided_by_what_is_left_on_all_ranks(two, one, name):
    """Samples have different numbers of targets, so that a rank's own number would be another divisor."""
    assert one["error"] is None
    for field in ("loss", "grad_norm"):
        mine, wanted = numbers(two[0][name], field), numbers(one, field)
        assert mine == pytest.approx(wanted, rel=1e-4, nan_ok=True)
        assert all(map(math.isfinite, mine))
