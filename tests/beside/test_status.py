"""`stabletrain status` names the state of every run of a sweep, from folders written by hand and a queue made up."""

import json
import os
from dataclasses import fields

import pytest

from stabletrain.beside import status
from stabletrain.beside.slurm import submitted
from stabletrain.beside.status import STATES, Standing, standings
from stabletrain.cli.commands import main
from stabletrain.errors import StabletrainError
from tests.beside.comparison.written import write

NOW = 1.7e9


def lines_until(step, pace=2.0, ago=0.0, every=10):
    """Returns lines of a run that has done `step` steps of `pace` seconds, the last one `ago` seconds ago."""
    steps = [1, *range(every, step + 1, every)]
    return [{"step": each, "time": NOW - ago - pace * (step - each), "train/ce": 3.0} for each in steps]


def run(folder, number, status, lines=None, **more):
    """Writes a run of a sweep over the seed, of 100 steps."""
    return write(folder / str(number), ["steps=100", f"seed={number}"], status=status, lines=lines, **more)


def by_name(folder):
    return {each.run: each for each in standings(folder)}


@pytest.fixture(autouse=True)
def queue(monkeypatch):
    """Sets what is in Slurm's queue: job, task and state of each. Until then there is no Slurm."""

    def queue(*told):
        words = [each.split() for each in told]
        states = {(job, int(task)): state for job, task, state in words}
        monkeypatch.setattr(submitted, "states", lambda everyone: states)

    def no_slurm(everyone):
        raise StabletrainError("squeue: No such file or directory")

    monkeypatch.setattr(submitted, "states", no_slurm)
    monkeypatch.setattr(status, "time", lambda: NOW)
    return queue


def submit(folder, job, count):
    """Writes the record of an array with a task for each run."""
    runs = {str(number): ["steps=100", f"seed={number}"] for number in range(count)}
    found = [{"job": job, "gpu": "a100", "runs": runs, "tasks": {name: int(name) for name in runs}}]
    folder.mkdir(parents=True)
    (folder / "slurm.json").write_text(json.dumps({"jobs": found}))


def test_every_state_is_told_with_what_belongs_to_it(tmp_path, queue):
    sweep = tmp_path / "sweep"
    submit(sweep, "17", 9)
    queue("17 0 PENDING", "17 1 PENDING", "17 2 RUNNING", "17 8 RUNNING", "99 3 RUNNING", "17 7 FAILED")
    incident = {"event": "incident", "step": 30, "tick": 30, "cause": "attention_logits", "fix": [], "path": None}
    run(sweep, 1, "preempted", lines_until(40), reason="SIGUSR2: its time is almost up")
    run(sweep, 2, "running", lines_until(40))
    run(sweep, 3, "halted", lines_until(30), reason="step 30: 10 steps in a row", events=[incident])
    run(sweep, 4, "finished", lines=[*lines_until(100), {"step": 100, "val/loss": 2.25}])
    run(sweep, 5, "failed", lines_until(20), reason="RuntimeError: CUDA out of memory\nmore")
    silent = run(sweep, 6, "running", lines_until(20, ago=7200.0))
    for file in silent.iterdir():
        os.utime(file, (NOW - 7200, NOW - 7200))
    found = by_name(sweep)
    assert {name: each.state for name, each in found.items()} == {
        "0": "queued",
        "1": "preempted",
        "2": "running",
        "3": "halted",
        "4": "finished",
        "5": "failed",
        "6": "silent",
        "7": "failed",
        "8": "running",
    }
    assert list(found) == ["5", "7", "6", "3", "1", "2", "8", "0", "4"], "what needs attention comes first"
    assert (found["2"].step, found["2"].steps, found["2"].seconds_left) == (40, 100, pytest.approx(120, rel=1e-3))
    assert found["4"].val_loss == 2.25
    assert found["3"].note == "attention_logits: step 30: 10 steps in a row"
    assert found["5"].note == "RuntimeError: CUDA out of memory"
    assert found["1"].note == "job 17_1 is queued again"
    assert found["6"].note.startswith("no sign of life since 2")
    assert found["6"].note.endswith("(2:00:00); job 17_6 is not in the queue")
    assert "job 17_7 has left the queue before a step" in found["7"].note
    assert found["8"].note == "it has just started"
    assert {each.overrides for each in found.values()} == {f"seed={n}" for n in range(9)}


def test_a_killed_run_that_slurm_has_queued_again_waits(tmp_path, queue):
    submit(tmp_path / "sweep", "17", 1)
    run(tmp_path / "sweep", 0, "running", lines_until(40))
    queue("17 0 PENDING")
    assert by_name(tmp_path / "sweep")["0"].state == "preempted"


def test_a_run_that_took_no_step_is_what_its_record_says(tmp_path):
    run(tmp_path, 0, "preempted", lines=[], reason="SIGTERM")
    run(tmp_path, 1, "failed", lines=[], reason="no such file")
    (tmp_path / "2" / ".hydra").mkdir(parents=True)
    assert {name: (each.state, each.note) for name, each in by_name(tmp_path).items()} == {
        "0": ("preempted", "SIGTERM"),
        "1": ("failed", "no such file"),
        "2": ("failed", "the run never started: run.json is missing"),
    }


def test_the_newest_job_of_a_run_is_asked_for(tmp_path, queue):
    sweep = tmp_path / "sweep"
    submit(sweep, "17", 2)
    again = {"job": "20", "gpu": "a100", "runs": {"1": ["seed=1"]}, "tasks": {"1": 1}}
    jobs = json.loads((sweep / "slurm.json").read_text())["jobs"]
    (sweep / "slurm.json").write_text(json.dumps({"jobs": [*jobs, again]}))
    queue("17 1 COMPLETED", "20 1 PENDING")
    found = by_name(sweep)
    assert [(found[name].state, found[name].job) for name in "01"] == [("failed", "17_0"), ("queued", "20_1")]


def test_without_slurm_the_runs_that_were_submitted_wait(tmp_path, queue):
    submit(tmp_path / "sweep", "17", 1)
    (found,) = standings(tmp_path / "sweep")
    assert (found.state, found.note) == ("queued", "there is no Slurm here to ask")


def test_the_sweeps_of_several_gpu_types_and_a_sweep_on_this_machine(tmp_path, queue):
    queue()
    for card in ("a100", "v100"):
        submit(tmp_path / "cards" / card, "17", 1)
    assert set(by_name(tmp_path / "cards")) == {"a100/0", "v100/0"}
    here = tmp_path / "here"
    run(here, 0, "finished")
    record = {"command": "train.py -m", "runs": [["seed=0"], ["seed=1"]], "varies": ["seed"], "count": 2}
    more = {"launcher": "basic", "began": 0.0, "options": [], "overrides": []}
    (here / "sweep.json").write_text(json.dumps(record | more))
    assert {name: each.state for name, each in by_name(here).items()} == {"0": "finished", "1": "queued"}


def test_a_slow_run_is_silent_only_after_several_of_its_own_intervals(tmp_path, queue):
    folder = run(tmp_path, 0, "running", lines_until(40, pace=30.0, ago=900.0))
    for file in folder.iterdir():
        os.utime(file, (NOW - 900, NOW - 900))
    assert standings(tmp_path)[0].state == "running", "it writes a line every five minutes"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_until(40, ago=900.0)))
    os.utime(folder / "metrics.jsonl", (NOW - 900, NOW - 900))
    assert standings(tmp_path)[0].state == "silent"


def test_the_screen_begins_with_the_counts_and_json_has_one_shape(tmp_path, queue, capsys):
    run(tmp_path / "s", 0, "finished", gpu_hours=2.5)
    run(tmp_path / "s", 1, "running", lines_until(50))
    run(tmp_path / "s", 2, "failed", reason="disk full")
    assert main(["status", str(tmp_path / "s")]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == f"3 runs in {tmp_path / 's'}: 1 failed, 1 running, 1 finished, 2.5 GPU-hours so far"
    assert [row.split()[:5] for row in rows] == [
        ["failed", "2", "seed=2", "step", "9/100"],
        ["running", "1", "seed=1", "step", "50/100"],
        ["finished", "0", "seed=0", "step", "9/100"],
    ]
    assert [rows[0].endswith("disk full"), rows[1].endswith("1:40 left"), rows[2].endswith("val loss 2.000")] == [
        True
    ] * 3
    assert main(["status", str(tmp_path / "s"), "--rows", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["2 more runs: --rows 0 shows all"]
    assert main(["status", str(tmp_path / "s"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["folder"], found["counts"]) == (str(tmp_path / "s"), {"failed": 1, "running": 1, "finished": 1})
    assert all([*each] == [field.name for field in fields(Standing)] for each in found["runs"])
    assert all(each["state"] in STATES for each in found["runs"])


def test_a_run_folder_is_one_line_and_an_empty_folder_is_refused(tmp_path, queue, capsys):
    assert main(["status", str(run(tmp_path, 3, "halted", lines_until(20), reason="no update"))]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == ["halted", "3", "step", "20/100", "no"]
    (tmp_path / "empty").mkdir()
    assert main(["status", str(tmp_path / "empty")]) == 2
    assert "contains no runs" in capsys.readouterr().err
    assert main(["status", str(tmp_path), "--rows", "-1"]) == 2
