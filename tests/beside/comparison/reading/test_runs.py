"""Reads runs in every state from folders written by hand, and ten thousand runs at once."""

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest

from stabletrain.beside.comparison import read_runs
from stabletrain.beside.comparison.reading.runs import names_of
from stabletrain.errors import ConfigError
from tests.beside.comparison.written import write


def only(folder):
    (run,) = read_runs([folder])
    return run


def test_a_step_that_was_taken_again_was_not_skipped(tmp_path):
    first = {"event": "skip", "step": 8, "tick": 8, "kind": "nonfinite"}
    again = {"event": "restore", "step": 8, "tick": 8, "to": 7}
    assert only(write(tmp_path / "cured", events=[first, again])).skips == []
    assert only(write(tmp_path / "not", events=[first, again, {**first, "tick": 9}])).skips == [8]


def test_incidents_skips_and_rollbacks_are_told_once_however_often_they_were_run(tmp_path):
    events = [
        {"event": "skip", "step": 7, "tick": 7, "kind": "overflow"},
        {"event": "skip", "step": 8, "tick": 8, "kind": "spike"},
        {"event": "incident", "step": 8, "tick": 8, "cause": "bad_batch", "fix": ["a"], "path": "incidents/step-8"},
        {"event": "resume", "step": 5},
        {"event": "skip", "step": 8, "tick": 8, "kind": "spike", "loss": 7.5},
        {"event": "incident", "step": 8, "tick": 8, "cause": "bad_label", "fix": ["b"], "path": "incidents/step-8"},
        {"event": "rollback", "step": 9, "tick": 9, "to": 5},
        {"event": "skip", "step": 8, "tick": 12, "kind": "nonfinite"},
        "no event",
        {"event": "incident", "step": "no step"},
    ]
    folder = write(tmp_path / "run", events=events)
    (folder / "incidents" / "step-8").mkdir(parents=True)
    (folder / "incidents" / "step-8" / "diagnosis.json").write_text('{"kind": "spike"}')
    run = only(folder)
    assert (run.skips, run.rollbacks) == ([8, 8], 1)
    np.testing.assert_array_equal(run.skip_losses, [7.5, math.nan])
    assert [(i["step"], i["kind"], i["cause"], i["fix"]) for i in run.incidents] == [(8, "spike", "bad_label", ["b"])]


def test_what_was_tried_after_a_halt_is_told_once_and_a_healing_only_if_the_run_went_on(tmp_path):
    told = {"step": 9, "tick": 9, "reason": "loss 7 is a spike", "to": 5, "arms": ["clip", "skip"], "steps": 300}
    first = {**told, "event": "heal", "arm": "clip", "settings": [], "base": []}
    last = {**told, "event": "unhealed", "tick": 20, "arm": "", "why": "none of 2 fixes holds"}
    events = [
        {"event": "halt", "step": 9, "tick": 9, "reason": "a"},
        first,
        {"event": "resume", "step": 5},
        first,
        last,
    ]
    run = only(write(tmp_path / "run", events=[*events, {"event": "heal", "step": 30, "to": "5", "arms": 7}]))
    whatifs = [(each["tick"], each["to"], each["arm"], each["arms"], each["steps"]) for each in run.whatifs]
    assert whatifs == [(9, 5, "clip", ["clip", "skip"], 300), (20, 5, "", ["clip", "skip"], 300), (0, 0, "", [], 0)]
    assert [each["path"] for each in run.healings] == ["whatif/halt-00000009/whatif.html"]


def test_of_copies_the_run_that_got_furthest_is_kept(tmp_path):
    short, long = ([{"step": step, "train/loss": 1.0} for step in range(1, last)] for last in (4, 9))
    write(tmp_path / "a" / "0", id="aaaa", lines=short, status="running")
    write(tmp_path / "b" / "0", id="aaaa", lines=long, status="failed", reason="no disk")
    write(tmp_path / "c" / "0", id=None)
    write(tmp_path / "d" / "0", id=None)
    kept, *others = read_runs([tmp_path])
    assert (kept.name, kept.steps, kept.copies) == ("b/0", 8, (tmp_path / "a" / "0",))
    assert kept.problem == f"no disk; counted once: run aaaa is also in {tmp_path / 'a' / '0'}"
    assert [(run.name, run.copies) for run in others] == [("c/0", ()), ("d/0", ())]


def test_names_have_as_many_folders_as_it_takes_to_tell_them_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names_of([Path("sweep/0"), Path("sweep/1")]) == ["0", "1"]
    assert names_of([Path("a/sweep/0"), Path("b/sweep/0"), Path("b/sweep/1")]) == [
        "a/sweep/0",
        "b/sweep/0",
        "b/sweep/1",
    ]
    assert names_of([Path()]) == [tmp_path.name]
    assert names_of([]) == []


def test_the_last_step_the_time_and_the_best_loss_are_those_of_the_lines(tmp_path):
    lines = [
        {"step": 1, "time": 100.0, "train/loss": 5.0},
        {"step": 3, "time": 103.5, "val/loss": 2.5},
        {"step": 4, "time": 104.0, "train/loss": 4.0},
        {"step": 5, "time": 107.0, "val/loss": 2.75},
    ]
    run = only(write(tmp_path / "run", lines=lines))
    assert (run.steps, run.seconds, run.best) == (5, 7.0, (2.5, 3))
    assert run.problem is None
    ended = write(tmp_path / "halted", lines=lines, status="halted", final={"steps": 7})
    assert only(ended).steps == 7, "the step of a halt is not always logged"


def damaged(folder, state):
    """Writes a run folder in a state that a crash, a user or a full disk can leave it in."""
    write(folder, lines=[{"step": 1, "train/ce": 5.0}, {"step": 2, "val/loss": 2.0}])
    record, metrics = folder / "run.json", folder / "metrics.jsonl"
    if state == "never began":
        (folder / ".hydra").mkdir()
        record.unlink(), metrics.unlink(), (folder / "events.jsonl").unlink()
    elif state == "record gone":
        record.unlink()
    elif state == "record torn":
        record.write_text('{"status": "fini')
    elif state == "record a list":
        record.write_text("[]")
    elif state == "record of odd parts":
        record.write_text('{"status": "finished", "hardware": 3, "final": null, "overrides": "x", "choices": []}')
    elif state == "unknown status":
        record.write_text('{"status": "winning"}')
    elif state == "metrics binary":
        metrics.write_bytes(b"\xff\x00\xfe\n" * 5)
    elif state == "metrics empty":
        metrics.write_text("")
    elif state == "metrics a folder":
        metrics.unlink(), metrics.mkdir()
    elif state == "a line torn":
        metrics.write_text(metrics.read_text() + '{"step": 3, "tra')
    elif state == "a line spoilt":
        metrics.write_text('{"step": 1, "train/ce": 5.0}\n{"st\n{"step": 2, "val/loss": 2.0}\n')
    elif state == "running":
        record.write_text('{"status": "running"}')
    elif state == "killed":
        record.write_text('{"status": "running"}')
        for file in (record, metrics):
            os.utime(file, (time.time() - 7200, time.time() - 7200))
    elif state == "failed":
        record.write_text('{"status": "failed", "reason": "no space left\\nTraceback"}')


@pytest.mark.parametrize(
    ("state", "status", "problem"),
    [
        ("never began", "empty", "the run never started: run.json is missing"),
        ("record gone", "broken", "run.json is missing"),
        ("record torn", "broken", "run.json is damaged: it is not valid JSON"),
        ("record a list", "broken", "run.json is damaged: its content is [], not an object"),
        ("record of odd parts", "finished", "run.json is damaged: choices is [], not an object"),
        ("unknown status", "broken", "run.json has an unknown status: 'winning'"),
        ("metrics binary", "broken", "no line of metrics.jsonl can be read"),
        ("metrics empty", "empty", "no step was logged"),
        ("metrics a folder", "broken", "its files cannot be read: Is a directory"),
        ("a line torn", "finished", None),
        ("a line spoilt", "finished", "1 line of metrics.jsonl cannot be read"),
        ("running", "running", None),
        ("killed", "running", "the status is running, but nothing was written for 2.0 h: the run may have been killed"),
        ("failed", "failed", "no space left"),
        ("whole", "finished", None),
    ],
)
def test_a_damaged_run_is_read_for_what_it_is_and_spoils_no_other(tmp_path, state, status, problem):
    damaged(tmp_path / "sweep" / "0", state)
    write(tmp_path / "sweep" / "1")
    first, second = read_runs([tmp_path / "sweep"])
    assert (first.status, first.problem) == (status, problem)
    assert second.status == "finished"
    assert len(first.curve("val/loss")[0]) in (0, 1)
    if status in ("finished", "running"):
        assert first.last("val/loss") == 2.0


def test_a_run_whose_arms_are_being_tried_after_a_halt_was_not_killed(tmp_path):
    damaged(tmp_path / "run", "killed")
    write(tmp_path / "run" / "whatif" / "halt-00000009" / "clip")
    assert only(tmp_path / "run").problem is None


def test_runs_are_found_at_any_depth_once_and_in_their_order(tmp_path):
    for name in ("a/2", "a/10", "b/x/y"):
        write(tmp_path / name)
    (tmp_path / "a" / "2" / "checkpoints").mkdir()
    write(tmp_path / "a" / "2" / "checkpoints" / "no-run-of-the-sweep")
    (tmp_path / "b" / "circle").symlink_to(tmp_path)
    found = [str(run.folder.relative_to(tmp_path)) for run in read_runs([tmp_path, tmp_path / "a" / "2"])]
    assert found == ["a/2", "a/10", "b/x/y"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="contains no runs: name a run folder"):
        read_runs([tmp_path])
    with pytest.raises(ConfigError, match="missing does not exist: name a run folder"):
        read_runs([tmp_path / "missing"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a folder"):
        read_runs([tmp_path / "file"])
