"""A run that halts and heals itself: it goes on as the arm that won, bit for bit, and says so."""

import json

import pytest

import stabletrain
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import read_jsonl
from tests.runs import TINY_GPT

HALTS = [*TINY_GPT, "steps=140", "precision=fp32", "optimizer.lr=3", "schedule=constant", "guard.max_rollbacks=0"]
HALTS += ["guard.patience=4", "log_every=1", "report=false", "wandb=disabled", "checkpoint.every=40", "eval_every=70"]


def logged(folder):
    """The losses that no rollback has undone, by step."""
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line]
    return {line["step"]: repr(line["train/loss"]) for line in lines if not line.get("rolled_back")}


def events(folder, kind):
    return [line for line in read_jsonl(folder / "events.jsonl") if line["event"] == kind]


@pytest.fixture(scope="module")
def healed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healed") / "run"
    return stabletrain.train([*HALTS, "guard.escalate=whatif", "guard.whatif_steps=600", f"hydra.run.dir={folder}"])


@pytest.mark.slow
def test_a_run_that_halts_goes_on_with_the_arm_that_won(healed):
    assert healed.status == "finished"
    (halt,), (heal,) = events(healed.folder, "halt"), events(healed.folder, "heal")
    assert (heal["tick"], heal["step"]) == (halt["tick"], halt["step"])
    place = healed.folder / "whatif" / f"halt-{halt['tick']:08d}"
    found = json.loads((place / "whatif.json").read_text())
    assert heal["arm"] == found["winner"]
    arm = logged(place / next(each["folder"] for each in found["arms"] if each["arm"] == heal["arm"]))
    run = logged(healed.folder)
    assert len(arm.keys() & run.keys()) >= 60
    assert {step: run[step] for step in arm if step in run} == {step: arm[step] for step in arm if step in run}
    assert max(run) == 140


@pytest.mark.slow
def test_without_room_for_an_arm_the_run_halts_and_says_what_to_type(tmp_path):
    run = [*HALTS, "guard.escalate=whatif", "guard.whatif_steps=10", f"hydra.run.dir={tmp_path / 'run'}"]
    found = stabletrain.train(run)
    assert found.status == "halted"
    assert "10 of guard.whatif_steps are left; fix: raise it" in (found.reason or "")
    assert [line["arm"] for line in events(found.folder, "unhealed")] == [""]


def test_without_checkpoints_there_is_nothing_to_go_on_from(tmp_path):
    kept = [each for each in HALTS if not each.startswith("checkpoint.")]
    with pytest.raises(ConfigError, match=r"guard\.escalate=whatif goes on from a checkpoint"):
        stabletrain.train([*kept, "guard.escalate=whatif", "checkpoint=off", f"hydra.run.dir={tmp_path / 'run'}"])
