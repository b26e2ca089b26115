"""Laws 3 and 8 on two ranks: if any rank sees a fault, all skip the update, and no state changes."""

import itertools

import pytest
import torch

from stabletrain.beside.faults.planned import random_index
from stabletrain.tracking.metrics import read_jsonl
from tests.parallel.launches import on_demand
from tests.runs import TINY_GPT, TINY_RESNET

pytestmark = [pytest.mark.timeout(600), pytest.mark.beside]

ALWAYS = ["forensics=off", "checkpoint=off", "monitors=none", "guard=skip", "schedule=constant", "warmup=none"]
ALWAYS += ["report=false"]
MODELS = {
    "gpt": [*TINY_GPT, *ALWAYS, "clipping=zclip", "batch_size=4"],
    "resnet": [*TINY_RESNET, *ALWAYS, "model.depth=8", "batch_size=8", "clipping=zclip"],
}
FORMATS = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "fp16": ["precision=fp16", "precision.init_scale=1", "precision.min_scale=1"],  # no calibration at the floor
}

KINDS = [
    *itertools.product(("input", "activation", "gradient"), ("nan", "inf")),
    *((kind, None) for kind in ("label", "ignored", "empty")),
]
MACHINE = ("activation", "gradient")
"""Kinds that `at` counts by ticks."""

SHAPES = {
    "gpt": {"input": (4, 16), "label": (4, 16)},
    "resnet": {"input": (8, 1, 8, 8), "label": (8,)},
}
"""Of whole batches, in which a fault of the data chooses its place."""


def faults_of(model):
    """Each kind of fault on each rank, in that rank's own samples, with a clean step after it.

    A step whose numbers may be the machine's fault is taken again, and applied then, which takes another tick.
    """
    faults, taken_again = [], 0
    for number, (rank, (kind, value)) in enumerate(itertools.product((0, 1), KINDS), 1):
        at = [2 * number + (taken_again if kind in MACHINE else 0)]
        taken_again += kind in MACHINE
        fault = {"kind": kind, "rank": rank, "at": at} | ({"value": value} if value else {})
        if shape := SHAPES[model].get(kind):
            fault["seed"] = seed_for(torch.empty(shape), 2 * number, rank)
        faults.append(fault)
    return faults


def seed_for(batch, position, rank):
    """The first seed by which a fault at that position hits a sample of that rank."""
    return next(seed for seed in range(99) if random_index(batch, seed, position)[0] * 2 // len(batch) == rank)


FAULTS = {model: faults_of(model) for model in MODELS}
BAD = [2 * number for number in range(1, 2 * len(KINDS) + 1)]
BAD_DATA = [f["at"][0] for f in FAULTS["gpt"] if f["kind"] in ("input", "label", "ignored", "empty")]
STEPS = max(BAD) + 3
KIND_OF = dict(zip(BAD, (fault["kind"] for fault in FAULTS["gpt"]), strict=True))
APPLIED = [
    applied
    for step in range(STEPS)
    for applied in ([False, True] if KIND_OF.get(step) in MACHINE else [step not in BAD])
]
"""By tick, whether an update is applied."""


def planned(faults):
    """The faults as an override."""
    each = ["{" + ",".join(f"{key}:{value}".replace(" ", "") for key, value in fault.items()) + "}" for fault in faults]
    return ["faults=plan", f"faults.faults=[{','.join(each)}]"]


PAIRS = [
    *("ddp/gpt/fp32", "ddp/gpt/fp16", "ddp/resnet/fp32"),
    *("fsdp/gpt/fp16", "fsdp/resnet/bf16", "fsdp/gpt/accumulated"),
]
"""Each kind with each model, with a loss scale and without; a ResNet has no overflows to tell from faults in fp16.

What DDP exchanges does not depend on bf16, in which only the forward pass computes.
"""


def overrides_of(kind, model, name):
    """The run of a case; with accumulation it is in fp32."""
    more = ["precision=fp32", "grad_accum_steps=2"] if name == "accumulated" else FORMATS[name]
    return [*MODELS[model], *more, f"parallel={kind}", f"steps={STEPS}", *planned(FAULTS[model])]


CASES = {name: {"overrides": overrides_of(*name.split("/"))} for name in PAIRS}


ESSENTIAL = ("ddp/gpt/fp32",)
"""The case of the fast tier; tests/guard/test_ranks.py has shards."""


@pytest.fixture(scope="module")
def two(shared_place):
    return on_demand(shared_place / "faults_two", 2, CASES, [[name for name in CASES if name not in ESSENTIAL]])


@pytest.fixture(params=CASES)
def both(request, two):
    found = [seen[request.param] for seen in two]
    assert [seen["error"] for seen in found] == [None, None], found[0]["message"]
    return found


@pytest.mark.slow(unless=lambda both: both in ESSENTIAL)
def test_every_rank_withholds_exactly_the_steps_with_a_fault(both):
    for seen in both:
        withheld = [reading["step"] - 1 for reading in seen["readings"] if not reading["applied"]]
        assert sorted({*withheld}) == BAD
        assert [step - 1 for step, verdict, _ in seen["verdicts"] if verdict == "skip"] == BAD
        bad_data = [step - 1 for step, verdict, kind in seen["verdicts"] if (verdict, kind) == ("skip", "bad_data")]
        assert bad_data == BAD_DATA


@pytest.mark.slow(unless=lambda name: name in ESSENTIAL)
@pytest.mark.parametrize("name", [name for name in CASES if "fp32" in name or "accumulated" in name])
def test_the_event_names_the_samples_of_whichever_rank_had_them(two, shared_place, name):
    """And their places in the whole batch, whatever the number of ranks."""
    model = name.split("/")[1]
    assert two[0][name]["error"] is None  # which runs the case, if no test before this one did
    lines = read_jsonl(shared_place / "faults_two" / name / "events.jsonl")
    events = {line["step"] - 1: line for line in lines if line["event"] == "skip"}
    for fault in FAULTS[model]:
        if fault["kind"] in ("input", "label"):
            (sample,) = events[fault["at"][0]]["samples"]
            index = random_index(torch.empty(SHAPES[model][fault["kind"]]), fault["seed"], fault["at"][0])[0]
            assert (sample["rank"], sample["index"], sample["fault"]) == (fault["rank"], index, fault["kind"])
            assert events[fault["at"][0]]["reason"].startswith(f"sample {index} of the batch: ")
        elif fault["kind"] in ("ignored", "empty"):
            (sample,) = events[fault["at"][0]]["samples"]
            assert (sample["index"], sample["fault"]) == (None, "ignored")
            assert ("the batch is empty" in events[fault["at"][0]]["reason"]) == (fault["kind"] == "empty")


@pytest.mark.slow(unless=lambda both: both in ESSENTIAL)
def test_a_withheld_step_changes_no_bit_on_any_rank(both):
    for seen in both:
        ticks = range(len(APPLIED))
        changed = [tick for tick in ticks if seen["states"][str(tick)] != seen["states"][str(tick + 1)]]
        assert changed == [tick for tick in ticks if APPLIED[tick]]


@pytest.mark.slow(unless=lambda both: both in ESSENTIAL)
def test_every_verdict_and_number_is_the_same_on_every_rank(both):
    first, second = both
    assert first["verdicts"] == second["verdicts"]
    assert str(first["readings"]) == str(second["readings"]), "NaN is not equal to itself"
    assert first["parts"] == second["parts"]


@pytest.mark.slow(unless=lambda both: both in ESSENTIAL)
def test_the_weights_are_the_same_on_every_rank_at_the_end(both):
    assert both[0]["weights"] == both[1]["weights"]


@pytest.mark.slow(unless=lambda both: both in ESSENTIAL)
def test_the_guilty_rank_is_known(both):
    for seen in both:
        named = {reading["step"] - 1: reading["rank"] for reading in seen["readings"] if reading["rank"] >= 0}
        for step, fault in zip(BAD, FAULTS["gpt"], strict=True):
            if fault["kind"] != "gradient":  # gradients are reduced before they are inspected
                assert named[step] == fault["rank"], fault
