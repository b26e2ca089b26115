"""A resume with other settings: whatever they do to the run, the state from which they began is still there."""

import json
import shutil

import pytest
import torch

import stabletrain
from stabletrain.checkpoint.folder import find
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.saved_states import SavedStates
from tests.once import once
from tests.runs import TINY_GPT

QUICK = ["guard=rollback", "guard.window=20", "guard.patience=3", "guard.snapshot_every=5", "guard.healthy_after=4"]
PLAIN = ["precision=fp32", "report=false", "forensics=off", "monitors=none", "checkpoint.every=10"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A healthy run of 40 steps that has finished."""

    def make(folder):
        typed = [*TINY_GPT, *QUICK, *PLAIN, "steps=40", "checkpoint.keep=2", f"hydra.run.dir={folder}"]
        assert stabletrain.train(typed).status == "finished"

    return once(tmp_path_factory, "pinned", make)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["optimizer.lr=30", "clipping.max_norm=1e9 optimizer=sgd optimizer.lr=1e4"])
def test_a_wrong_setting_costs_nothing_of_what_was_trained_before(run, changed):
    before = find(run).load_model()
    assert stabletrain.train([f"resume={run}", "steps=200", *changed.split()]).status == "halted"
    rollbacks = [line for line in read_jsonl(run / "events.jsonl") if line["event"] == "rollback"]
    assert rollbacks
    assert {line["to"] for line in rollbacks} == {40}
    assert find(run).step == 40
    after = find(run).load_model()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_without_the_pinned_state_the_run_halts_and_says_so(run, monkeypatch):
    """Its snapshot is damaged, and so is its checkpoint: an older state is not taken in its place."""
    monkeypatch.setattr(SavedStates, "newest_intact", lambda self, target, **options: None)

    def spoil(self, *typed):
        shutil.rmtree(run / "checkpoints" / "step-00000040", ignore_errors=True)
        return wanted(self, *typed)

    wanted = SavedStates.before_trouble
    monkeypatch.setattr(SavedStates, "before_trouble", spoil)
    assert stabletrain.train([f"resume={run}", "steps=200", "optimizer.lr=30"]).status == "halted"
    reason = json.loads((run / "run.json").read_text())["reason"]
    assert "the state of step 40, from which the run was resumed with other settings, is damaged" in reason
    assert (run / "checkpoints" / "step-00000030").exists()
