"""The lines that a sweep prints: at its start, at the end of each run, and at its end."""

import json
import os
import time

import pytest

from stabletrain.beside.sweep import lines
from stabletrain.beside.sweep.plan import Sweep
from tests.beside.sweep.given import RUNS, ran, sweep_of


def test_the_opening_says_how_many_runs_and_how_many_are_over(tmp_path):
    sweep = sweep_of(tmp_path)
    assert lines.opening(sweep) == f"sweep    4 runs in {tmp_path}"
    for number, status in enumerate(["finished", "halted", "failed"]):
        ran(tmp_path / str(number), RUNS[number], status)
    assert lines.opening(sweep) == f"sweep    4 runs in {tmp_path}, 2 already done"
    assert lines.opening(sweep._replace(count=None)).startswith(f"sweep    in {tmp_path}")


def test_a_label_has_the_number_and_what_varies(tmp_path):
    runs = [["steps=5", f"seed={seed}"] for seed in (*range(9), 100)]
    sweep = sweep_of(tmp_path, runs, 10)
    assert lines.label(sweep, 0, runs[0]) == " 1/10  seed=0  ", "as wide as the widest"
    assert lines.label(sweep, 9, runs[9]) == "10/10  seed=100"
    assert lines.label(sweep._replace(runs=None, count=None), 3, ["seed=3"]) == "4  seed=3"
    assert lines.label(None, 0, ["seed=3", "steps=5"]) == "1  seed=3 steps=5"


def test_a_run_that_finished_shows_its_loss_and_the_time_left(tmp_path, monkeypatch):
    sweep = sweep_of(tmp_path, began=1000.0)
    record = ran(tmp_path / "0", RUNS[0], loss=2.3456)
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    assert lines.ending(sweep, 0, RUNS[0], record, 14.2) == "1/4  seed=0  finished   val loss 2.346  14 s  5:00 left"
    assert lines.ending(sweep, 0, RUNS[0], record, 92.0).endswith("val loss 2.346  1:32  5:00 left")


def test_a_run_that_was_over_before_says_so(tmp_path):
    record = ran(tmp_path / "0", RUNS[0])
    assert lines.ending(sweep_of(tmp_path), 0, RUNS[0], record, None).endswith("val loss 2.000  (before)")


def test_a_run_that_did_not_finish_says_why(tmp_path):
    record = {"status": "halted", "reason": "loss\n  is " + "x" * 200}
    told = lines.ending(sweep_of(tmp_path), 0, RUNS[0], record, 3.0)
    assert told == "1/4  seed=0  halted     val loss -  3 s  " + ("loss is " + "x" * 200)[:100]
    assert "failed     val loss -" in lines.ending(None, 0, RUNS[0], {}, 3.0), "without a record it failed"


@pytest.mark.parametrize(
    ("final", "told"),
    [
        ({"val/loss": 2.3111, "val/accuracy": 0.98765}, "val loss 2.311, accuracy 98.77 %"),
        ({"val/loss": 1.0, "guard/skipped_spike": 2, "guard/skipped_nonfinite": 1}, "val loss 1.000, 3 skipped"),
        ({"val/loss": 1.0, "guard/rollbacks": 1}, "val loss 1.000, 1 rollback"),
        ({"val/loss": 1.0, "guard/rollbacks": 2}, "val loss 1.000, 2 rollbacks"),
        ({"val/loss": 1.0, "guard/rollbacks": 1, "guard/healings": 1}, "val loss 1.000, 1 rollback, 1 healing"),
        ({}, "val loss -"),
    ],
)
def test_a_result_says_what_the_guard_did_only_if_it_did_anything(final, told):
    assert lines.result({"final": final}) == told


def test_the_time_left_is_estimated_from_the_pace(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    runs = [[f"seed={number}"] for number in range(8)]
    for number, status in enumerate(["finished", "finished", "failed", "halted", "running"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "run.json").write_text(json.dumps({"status": status, "overrides": runs[number]}))
        os.utime(tmp_path / str(number) / "run.json", (800, 800) if number else (100, 100))
    sweep = Sweep(tmp_path, "train.py", runs, ["seed"], 8, "basic", 700.0)
    assert lines.seconds_left(sweep) == 300 / 3 * 4, "three in 300 s, four to go"


def test_no_time_left_is_shown_before_the_first_run_ends_or_after_the_last(tmp_path):
    assert lines.seconds_left(sweep_of(tmp_path)) is None
    for number in range(4):
        ran(tmp_path / str(number), RUNS[number])
    assert lines.seconds_left(sweep_of(tmp_path)) is None


def test_the_closing_names_the_best_run_and_those_that_did_not_finish(tmp_path):
    ran(tmp_path / "0", RUNS[0], loss=2.5)
    ran(tmp_path / "1", RUNS[1], loss=2.25)
    ran(tmp_path / "2", RUNS[2], "failed", reason="optimizer.lr=-1\nis bad")
    ran(tmp_path / "3", RUNS[3], "preempted", reason="SIGTERM")
    assert lines.closing(sweep_of(tmp_path)._replace(count=5)).splitlines() == [
        f"sweep    5 runs, 2 finished, 1 failed, 1 preempted, 1 not started, in {tmp_path}",
        f"lowest   val loss 2.250  seed=1  {tmp_path / '1'}",
        f"failed   seed=2  {tmp_path / '2'}  optimizer.lr=-1 is bad",
        f"preempted seed=3  {tmp_path / '3'}  SIGTERM",
        f"then     python train.py resume={tmp_path} runs what is missing or failed",
        f"next     stabletrain compare {tmp_path}",
    ]


def test_a_sweep_whose_runs_all_finished_has_nothing_to_resume(tmp_path):
    folder = tmp_path / "my sweep"
    for number in range(4):
        ran(folder / str(number), RUNS[number], loss=2.0 + number)
    told = lines.closing(sweep_of(folder)).splitlines()
    assert [line.split()[0] for line in told] == ["sweep", "lowest", "next"]
    assert told[0] == f"sweep    4 runs, 4 finished, in {folder}"
    assert told[2] == f"next     stabletrain compare '{folder}'"


def test_before_any_run_began_all_are_missing(tmp_path):
    told = lines.closing(sweep_of(tmp_path)).splitlines()
    assert told[0] == f"sweep    4 runs, 4 not started, in {tmp_path}"
    assert [line.split()[0] for line in told] == ["sweep", "then"]


@pytest.mark.parametrize("loss", ["nan", "inf", None, "a word"])
def test_a_loss_that_is_no_finite_number_is_never_the_best(loss):
    value = float(loss) if loss in ("nan", "inf") else loss
    assert lines.loss_of({"status": "finished", "final": {"val/loss": value}}) == float("inf")
    assert lines.loss_of({"status": "halted", "final": {"val/loss": 1.0}}) == float("inf")
    assert lines.loss_of({"status": "finished", "final": {"val/loss": 1.0}}) == 1.0


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (["finished"] * 4, 0),
        (["finished"] * 3, 75),
        (["finished", "halted", "failed"], 3),
        (["finished", "failed", "halted", "finished"], 1),
        (["preempted", "finished"], 75),
    ],
)
def test_the_exit_code_is_that_of_the_first_run_that_did_not_finish(tmp_path, ends, code):
    for number, status in enumerate(ends):
        ran(tmp_path / str(number), RUNS[number], status)
    assert lines.code(sweep_of(tmp_path)) == code


def test_a_run_that_recorded_its_exit_code_decides(tmp_path):
    ran(tmp_path / "0", RUNS[0], "failed", exit_code=2)
    assert lines.code(sweep_of(tmp_path)) == 2
