"""Law 4 on several ranks: a run that stopped dead and is resumed ends as one that never stopped; numbers of ranks may
change in between, and what was saved arrives bit by bit.
"""

import json
import shutil

import pytest

from stabletrain.checkpoint.folder import find
from stabletrain.checkpoint.tree import flatten
from stabletrain.tracking.metrics import read_jsonl
from tests.parallel.launches import alone, performed
from tests.parallel.worker import of_tensor, perform
from tests.reliability.ends import everything, metrics
from tests.runs import TINY_GPT, TINY_RESNET

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.beside]

ALWAYS = ["forensics=off", "monitors=none", "log_every=1", "schedule=constant", "warmup=none", "precision=fp32"]
QUICK = [
    *("guard=rollback", "guard.window=20", "guard.patience=3", "guard.snapshot_every=5", "guard.healthy_after=4"),
    *("guard.skip_batches=2", "guard.lr_steps=6", "checkpoint.every=6", "eval_every=10", "steps=30"),
    *("faults=learning_rate", "faults.at=[23]", "faults.factor=1e5"),
]
KINDS = ("ddp", "fsdp")
RUNS = {
    "gpt": [*TINY_GPT, *ALWAYS, *QUICK, "model.n_layer=1", "model.dropout=0.1", "clipping=zclip", "averaging=ema"],
    "resnet": [
        *[*TINY_RESNET, *ALWAYS, "model.depth=8", "steps=10", "checkpoint.every=3", "eval_every=5"],
        *("faults=label", "faults.at=[4]", "faults.rank=1", "averaging=snapshots", "averaging.start_share=0"),
    ],
}
CRASHES = {("gpt", "ddp"): 25, ("gpt", "fsdp"): 30, ("resnet", "ddp"): 5, ("resnet", "fsdp"): 5}
"""Ticks: within the trouble, and after the rollback; after a withheld step.

Each tick with one kind: `tests/trainer/test_rollback.py` stops one process at four ticks of such a run.
"""

CASES = {}
for kind in KINDS:
    for name, chosen in RUNS.items():
        overrides = [*chosen, f"parallel={kind}"]
        CASES[f"{kind}/{name}/whole"] = {"overrides": overrides}
        folder, crash_at = f"{kind}/{name}/cut", CRASHES[name, kind]
        CASES[f"{folder}/crash"] = {"overrides": overrides, "folder": folder, "crash_at": crash_at}
        CASES[f"{folder}/resume"] = {"overrides": [*overrides, "resume=auto"], "folder": folder}

SAVED = [*TINY_GPT, *ALWAYS, "checkpoint.every=4", "eval_every=4", "averaging=ema"]
RESHARD = {
    kind: {
        "overrides": [*SAVED, f"parallel={kind}", "steps=8", "resume=auto"],
        "folder": f"reshard/{kind}",
        "tensors": True,
    }
    for kind in KINDS
}
"""Four steps on one rank, four on two, four on one."""


@pytest.fixture(scope="module")
def place(shared_place):
    return shared_place / "resume_two"


@pytest.fixture(scope="module")
def two(place):
    place.mkdir(exist_ok=True)
    with alone(place / "before"):
        for kind in KINDS:
            if not (place / f"reshard/{kind}/run.json").exists():
                perform(place, kind, {"overrides": [*SAVED, "steps=4"], "folder": f"reshard/{kind}"})
    return performed(place, 2, CASES | RESHARD)


def events(folder, kind):
    return [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == kind]


def saved(folder):
    """All that the last checkpoint holds but the clock."""
    return everything(max((folder / "checkpoints").glob("step-*")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RUNS)
def test_killed_and_resumed_equals_never_having_stopped(two, place, kind, name):
    whole, cut = place / f"{kind}/{name}/whole", place / f"{kind}/{name}/cut"
    for seen in two:
        end, resumed = seen[f"{kind}/{name}/whole"], seen[f"{kind}/{name}/cut/resume"]
        assert seen[f"{kind}/{name}/cut/crash"]["error"] == "Crash"
        assert resumed["error"] is None, resumed["message"]
        for field in ("weights", "parts", "val", "step", "tick", "skips", "rollbacks"):
            assert resumed[field] == end[field], field
        assert resumed["states"][str(end["tick"])] == end["states"][str(end["tick"])]
    assert metrics(cut) == metrics(whole)
    assert saved(cut) == saved(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_there_was_a_rollback_and_every_rank_went_back(two, place, kind):
    (event,) = events(place / f"{kind}/gpt/whole", "rollback")
    for seen in two:
        found = seen[f"{kind}/gpt/whole"]
        assert found["rollbacks"] == 1
        assert [verdict for _, verdict, _ in found["verdicts"]].count("rollback") == 1
        again = len(events(place / f"{kind}/gpt/whole", "restore"))  # steps taken again: each takes one more tick
        assert found["tick"] == 30 + event["step"] - event["to"] + again
        assert found["states"][str(found["tick"])]
    assert two[0][f"{kind}/gpt/whole"]["weights"] == two[1][f"{kind}/gpt/whole"]["weights"]


def saved_tensors(folder, step):
    """Hashes of a checkpoint's weights, moments and averages, as `worker.tensors_of` names them."""
    tree = find(folder / "checkpoints" / f"step-{step:08d}").load()
    tensors, _ = flatten({"model": tree["model"], "optimizer": tree["optimizer"]["state"], "average": tree["average"]})
    return {name: of_tensor(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_from_one_rank_to_two_and_back_exactly(two, place, tmp_path, kind):
    folder = place / f"reshard/{kind}"
    shutil.copytree(folder, tmp_path / "run")
    last = perform(
        tmp_path, "last", {"overrides": [*SAVED, "steps=12", "resume=auto"], "folder": "run", "tensors": True}
    )
    assert last["error"] is None, last["message"]
    for seen in two:
        assert seen[kind]["error"] is None, seen[kind]["message"]
        assert seen[kind]["tensors_before"] == saved_tensors(folder, 4)
        assert seen[kind]["tensors_after"] == saved_tensors(folder, 8) == last["tensors_before"]
        assert seen[kind]["tensors_after"] != seen[kind]["tensors_before"]
    assert any("exp_avg" in name for name in last["tensors_before"])
    straight = perform(tmp_path, "straight", {"overrides": [*SAVED, "steps=12"]})
    assert last["val"]["val/loss"] == pytest.approx(straight["val"]["val/loss"], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_one_writer(two, place, kind):
    """No line is written twice, and a resumed run appends to what is there."""
    for name in RUNS:
        folder = place / f"{kind}/{name}/whole"
        ticks = [line["tick"] for line in metrics(folder) if "train/loss" in line]
        again = {event["tick"] for event in events(folder, "restore")}  # these steps were taken again, and logged then
        assert ticks == [tick for tick in range(1, two[0][f"{kind}/{name}/whole"]["tick"] + 1) if tick not in again]
        assert json.loads((folder / "run.json").read_text())["status"] == "finished"
        assert len(events(folder, "rollback")) == (name == "gpt")
        found = [(event["event"], event["step"]) for event in read_jsonl(folder / "events.jsonl")]
        assert len(found) == len(set(found)) or name == "gpt", "steps that a rollback repeats are saved again"
