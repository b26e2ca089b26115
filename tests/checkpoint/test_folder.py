"""A resume prefers a healthy checkpoint to a newer one that is not; a rollback reads no more than it has to.

Which checkpoints are kept and found is in `test_any_history.py`.
"""

import json
import shutil
from pathlib import Path

import pytest

from stabletrain.checkpoint import reader
from stabletrain.checkpoint.folder import find, kept
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.tracking.metrics import read_jsonl
from tests.checkpoint.given import Run, flip, rewrite_manifest
from tests.runs import TINY_GPT, command

# ------------------------------------------------------------------------------------ what a run continues from


def test_the_newest_is_preferred_in_silence_where_it_is_healthy(run, capfd):
    run.save(10, healthy=False)
    run.save(2000)
    run.events.clear()
    assert run.preferred().step == 2000
    assert find(run.folder).step == 2000
    assert not run.events
    assert capfd.readouterr().err == ""


def test_a_healthy_one_is_preferred_to_newer_ones_and_a_line_says_so(tmp_path, capfd):
    run = Run(tmp_path, keep=4)
    for step in (10, 20, 30, 40):
        run.save(step, healthy=step < 30)
    run.events.clear()
    assert run.preferred().step == 20
    line = f"stabletrain: checkpoint skipped: {run.path(40)} is not healthy: continuing from step-00000020, which is\n"
    assert capfd.readouterr().err == line
    assert run.events == [("checkpoint_skipped", 40, {"path": "step-00000040", "reason": "not healthy"})]
    for path in (tmp_path, run.folder):
        assert find(path).step == 20
        assert capfd.readouterr().err == line
    assert find(run.path(40)).step == 40  # asked for by name
    assert capfd.readouterr().err == ""


def test_where_none_is_healthy_the_newest_is_used_and_a_line_says_so(tmp_path, capfd):
    run = Run(tmp_path, keep=3)
    for step in (10, 20, 30):
        run.save(step, healthy=False)
    flip(run.path(30) / "state.json")
    run.events.clear()
    assert run.preferred().step == 20
    damaged, sick = capfd.readouterr().err.splitlines()
    assert f"{run.path(30)}: state.json does not match" in damaged
    says = f"{run.path(20)} is not healthy, and no healthy one is left: continuing from it anyway"
    assert sick == f"stabletrain: {says}"
    assert [(kind, step) for kind, step, _ in run.events] == [("checkpoint_skipped", 30)]


def test_of_each_retained_state_the_checkpoint_to_go_back_to_is_kept():
    known = [Checkpoint(Path(f"step-{step}"), step, False, None, {}) for step in (10, 20, 30, 40)]
    steps = [{int(path.name[5:]) for path in kept(known, 1, False, anchors)} for anchors in ((), (25,), (20, 9), (99,))]
    assert steps == [{40}, {20, 40}, {20, 40}, {40}]


def test_beside_the_newest_the_last_two_healthy_ones_are_kept():
    known = [Checkpoint(Path(f"step-{step}"), step, step < 40, None, {}) for step in (10, 20, 30, 40, 50)]
    steps = [{int(path.name[5:]) for path in kept(known, keep, False)} for keep in (1, 2, 3)]
    assert steps == [{30, 50}, {20, 30, 40, 50}, {20, 30, 40, 50}]


def test_a_run_reaches_back_as_far_as_its_oldest_checkpoint(tmp_path):
    run = Run(tmp_path, keep=4)
    assert not run.checkpoints.reaches(10)
    for step in (20, 30):
        run.save(step)
    assert [run.checkpoints.reaches(step) for step in (19, 20, 21, 35)] == [False, True, True, True]


# ----------------------------------------------------------------------------------------- what is left behind


def test_a_rollback_reads_through_only_what_this_process_has_not(tmp_path, monkeypatch):
    """Training waits for it, and to read a checkpoint through takes as long as many steps on a card."""
    run, read = Run(tmp_path, keep=5), []
    for step in (10, 20, 30):
        run.save(step)

    def counted(run):
        folder = run.checkpoints._folder
        verify = folder._verify
        monkeypatch.setattr(folder, "_verify", lambda path: read.append(path.name[-2:]) or verify(path))

    counted(run)
    run.checkpoints.rewind(20)
    assert (run.steps(), read) == ([10, 20], [])
    assert run.newest().step == 20
    assert read == ["20"], "what is continued from is always read through"
    flip(run.path(20) / "model.safetensors")
    run.checkpoints.rewind(20)
    assert read == ["20", "20"], "it was touched; the one before it was not"
    again = Run(tmp_path, keep=5)
    counted(again)
    again.checkpoints.rewind(20)
    again.checkpoints.rewind(20)
    assert read[2:] == ["20", "10", "20"], "another process has read nothing yet"


# ---------------------------------------------------------------------------------------- as a user sees it


@pytest.mark.slow
def test_resume_prefers_the_healthy_one_and_says_so(tmp_path):
    chosen = [*TINY_GPT, "hydra.run.dir=run", "checkpoint.every=3", "eval_every=3", "log_every=1"]
    done = command(*chosen, "steps=6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    rewrite_manifest(newest, healthy=False)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    done = command(*chosen, "steps=9", "resume=auto", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = f"stabletrain: checkpoint skipped: {newest} is not healthy: continuing from step-00000003, which is"
    assert [each for each in done.stderr.splitlines() if "checkpoint" in each] == [line]
    assert "resumed after step 3, from" in done.stdout
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert [(e["step"], e["reason"]) for e in events if e["event"] == "checkpoint_skipped"] == [(6, "not healthy")]
    assert reader.verify(newest).healthy  # made anew
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    named = command(*chosen[:-4], "hydra.run.dir=new", "steps=9", "resume=other", cwd=tmp_path)
    assert named.returncode == 0, named.stderr
    assert "step-00000006 is not healthy: continuing from step-00000003" in named.stderr
    assert "resumed after step 3, from" in named.stdout
    named = command(*chosen[:-4], "hydra.run.dir=newer", "steps=9", f"resume={newest}", cwd=tmp_path / "other")
    assert "resumed after step 6, from" in named.stdout
