"""HSDP on four ranks, two copies of two shards: one process's results, one verdict, and copies alike bit for bit."""

import itertools
import json
import math

import pytest
import torch

from stabletrain.beside.faults.planned import random_index
from stabletrain.checkpoint.folder import find
from stabletrain.cli.commands import main
from stabletrain.parallel.hsdp import HSDP
from stabletrain.parallel.ranks import Ranks
from stabletrain.records import GradNorms
from stabletrain.tracking.metrics import read_jsonl
from tests.parallel.launches import performed
from tests.parallel.test_distributed import FEW_ROWS, GPT, agree
from tests.parallel.test_resume import QUICK, saved, saved_tensors
from tests.parallel.worker import numbers, perform
from tests.runs import TINY_GPT

pytestmark = [pytest.mark.timeout(600), pytest.mark.beside]  # some runs have injected faults

COPIES = ["parallel=hsdp", "parallel.shard=2"]
AS_ONE = {
    "adagc": [*GPT, "clipping=adagc", "clipping.warmup_steps=2", "clipping.max_norm=0.1", "grad_accum_steps=2"],
    "muon": [*GPT, "optimizer=muon", "optimizer.per_head=true", "qkclip=kimi", "qkclip.max_logit=1e-3"],
    "few_rows": FEW_ROWS,
}
ALWAYS = ["monitors=none", "log_every=1", "schedule=constant", "warmup=none", "precision=fp32"]
BAD = 3
SEED = next(s for s in range(99) if random_index(torch.empty(8, 16), s, BAD)[0] // 2 == 3)
"""Puts a bad label into the samples of rank 3."""
ONE_FAULT = [*TINY_GPT, *ALWAYS, "batch_size=8", "steps=6", "checkpoint=off", "guard=skip", "faults.rank=3"]
ONE_FAULT += [f"faults.at=[{BAD}]"]
FAULTS = {
    "label": [*ONE_FAULT, "faults=label", f"faults.seed={SEED}"],
    "activation": [*ONE_FAULT, "faults=activation"],
    "update": [*ONE_FAULT, "faults=optimizer", "guard=rollback"],
}
GUARDED = [
    *TINY_GPT,
    "model.n_layer=1",
    *ALWAYS,
    *QUICK,
    "forensics=off",
    "model.dropout=0.1",
    "clipping=zclip",
    "averaging=ema",
]
GUARDED += ["steps=28", *COPIES]
FLIPPED = [
    *TINY_GPT,
    "model.n_layer=1",
    *ALWAYS,
    "forensics=off",
    "model.dropout=0.1",
    "steps=10",
    "checkpoint.every=4",
    "eval_every=8",
]
FLIPPED += ["guard.snapshot_every=5", "guard.healthy_after=2", *COPIES]
FLIP = ["faults=bitflip", "faults.at=[6]", "faults.rank=2", "faults.bit=12"]
SAVED = [*TINY_GPT, "model.n_layer=1", *ALWAYS, "forensics=off", "checkpoint.every=4", "eval_every=4", "averaging=ema"]

RUNS = {name: [*chosen, *COPIES] for name, chosen in (AS_ONE | FAULTS).items()}
RUNS |= {"rollback": GUARDED, "clean": FLIPPED, "flip": [*FLIPPED, *FLIP]}
CASES = {name: {"overrides": chosen} for name, chosen in RUNS.items()}
CASES["crash"] = {"overrides": GUARDED, "folder": "cut", "crash_at": 26}
CASES["resume"] = {"overrides": [*GUARDED, "resume=auto"], "folder": "cut"}
CASES["fsdp"] = {"overrides": [*SAVED, "parallel=fsdp", "steps=4"], "tensors": True}


@pytest.fixture(scope="module")
def place(shared_place):
    return shared_place / "hsdp"


@pytest.fixture(scope="module")
def four(place):
    def after(run, kind, steps):
        chosen = [*SAVED, *([f"parallel={kind}"] if kind != "hsdp" else COPIES), f"steps={steps}"]
        return {"overrides": [*chosen, f"resume={place / run}"], "tensors": True}

    cases = CASES | {"saved": after("fsdp", "hsdp", 8), "ddp": after("saved", "ddp", 8)}
    cases |= {"again": after("saved", "hsdp", 8), "sharded": after("saved", "fsdp", 8)}
    return performed(place, 4, cases)


def events(folder, kind):
    return [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == kind]


def copies_are_alike(four, name):
    """What the ranks saw of a run that ended; those with the same shards had the same bits in every step."""
    found = [seen[name] for seen in four]
    assert [seen["error"] for seen in found] == [None] * 4, found[0]["message"]
    for one, other in ((found[0], found[2]), (found[1], found[3])):
        assert one["states"] == other["states"]
    for seen in found[1:]:
        for field in ("verdicts", "weights", "parts"):
            assert seen[field] == found[0][field], field
        assert str(seen["readings"]) == str(found[0]["readings"])
    return found


def test_a_norm_is_that_of_one_copy_and_what_is_not_finite_in_any_copy_counts():
    """Of two tensors, ranks 0 and 2 hold parts of norms 3 and 0, ranks 1 and 3 of norms 4 and 12."""
    hsdp = HSDP(Ranks(3, 4, 3, launched=True), 2)
    rows = torch.tensor([[9.0, 0.0], [16.0, 144.0]]).repeat(2, 1)
    found = hsdp.norms_from_rows(GradNorms(torch.tensor(0.0), torch.zeros(2)), rows)
    assert (found.each.tolist(), found.total.item()) == ([5.0, 12.0], 13.0)
    for value in (torch.nan, torch.inf):
        rows[2, 1] = value
        found = hsdp.norms_from_rows(GradNorms(torch.tensor(0.0), torch.zeros(2)), rows)
        assert not math.isfinite(found.total)
        assert found.each[0] == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", AS_ONE)
def test_copies_of_shards_compute_what_one_process_does(four, tmp_path, name):
    alone = perform(tmp_path, "one", {"overrides": AS_ONE[name]})
    for seen in copies_are_alike(four, name):
        if name == "few_rows":  # in bf16
            assert numbers(seen, "loss") == pytest.approx(numbers(alone, "loss"), rel=5e-3)
        else:
            agree(seen, alone, rel=1e-4)
            for field in ("update", "weights"):
                assert numbers(seen, field) == pytest.approx(numbers(alone, field), rel=1e-4), field


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_withheld_by_all_and_the_rank_is_named(four, place, name):
    for seen in copies_are_alike(four, name):
        states = [seen["states"][str(tick)] for tick in range(len(seen["states"]))]
        assert [tick for tick, (a, b) in enumerate(itertools.pairwise(states)) if a == b] == [BAD]
        assert (seen["step"], seen["machine_faults"]) == (6, int(name != "label"))
    (path,) = (place / name / "incidents").iterdir()
    found = json.loads((path / "diagnosis.json").read_text())
    assert found["rank"] == 3
    assert found["cause"] == {"label": "bad_label"}.get(name, "hardware_fault")


@pytest.mark.slow
def test_the_gathered_incident_of_one_rank_is_replayed_in_one_process(four, place, capsys):
    """The part of the rank at fault, with the weights of its copy: in the step the fault made the loss NaN."""
    copies_are_alike(four, "activation")
    (path,) = (place / "activation" / "incidents").iterdir()
    replays = json.loads((path / "diagnosis.json").read_text())["replays"]
    assert main(["replay", "--json", str(path)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["now"]["loss"] == pytest.approx(replays["same"]["loss"], rel=1e-6)
    assert math.isfinite(again["now"]["grad_norm"])


@pytest.mark.slow
def test_all_go_back_together_and_a_killed_run_ends_as_one_that_was_not(four, place):
    found = copies_are_alike(four, "rollback")
    (event,) = events(place / "rollback", "rollback")
    for seen, resumed in zip(found, copies_are_alike(four, "resume"), strict=True):
        assert seen["rollbacks"] == 1
        assert seen["tick"] == 28 + event["step"] - event["to"] + len(events(place / "rollback", "restore"))
        for field in ("weights", "parts", "val", "step", "tick", "skips", "rollbacks"):
            assert resumed[field] == seen[field], field
    assert [seen["crash"]["error"] for seen in four] == ["Crash"] * 4
    assert len(events(place / "cut", "resume")) == 1
    assert saved(place / "cut") == saved(place / "rollback")


@pytest.mark.slow
def test_a_flipped_bit_of_one_copy_is_undone(four, place):
    copies_are_alike(four, "clean")
    for seen in four:
        assert seen["flip"]["error"] is None, seen["flip"]["message"]
        assert seen["flip"]["weights"] == seen["clean"]["weights"]
        assert (seen["flip"]["rollbacks"], seen["flip"]["machine_faults"]) == (0, 1)
    (event,) = events(place / "flip", "divergence")
    assert event["step"] == 8, "before the first state that would have been saved"


@pytest.mark.slow
def test_each_shard_is_written_once_and_any_kind_of_run_goes_on_from_it(four, place, tmp_path):
    copies_are_alike(four, "saved")
    folder = place / "saved" / "checkpoints" / "step-00000008"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
    shards = [
        f"{part}/shard-0000{n}-model-00001-of-00001.safetensors" for part in ("model", "training") for n in (1, 2)
    ]
    assert files == shards, "by the two ranks of the first copy"
    assert find(folder).healthy
    written = saved_tensors(place / "saved", 8)
    for seen in four:
        assert seen["saved"]["tensors_before"] == seen["fsdp"]["tensors_after"]
        assert seen["saved"]["tensors_after"] == written
        for kind in ("ddp", "again", "sharded"):
            assert seen[kind]["error"] is None, seen[kind]["message"]
            assert seen[kind]["tensors_before"] == written, kind
    onward = [*SAVED, "steps=9", f"resume={place / 'saved'}"]
    for seen in performed(tmp_path / "two", 2, {"fsdp": {"overrides": [*onward, "parallel=fsdp"], "tensors": True}}):
        assert seen["fsdp"]["error"] is None, seen["fsdp"]["message"]
        assert seen["fsdp"]["tensors_before"] == written
    alone = perform(tmp_path, "one", {"overrides": onward, "tensors": True})
    assert alone["error"] is None, alone["message"]
    assert alone["tensors_before"] == written
