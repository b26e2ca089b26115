"""run.json says what a run is and how it ended, and no run overwrites another."""

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.tracking import metrics, run_folder
from stabletrain.tracking.run_folder import Description, RunFolder, check_same_data, git

WHAT = Description(choices={"model": "gpt_nano"}, hardware={"device": "cpu"}, data={"name": "stdlib", "bytes": 12})


def record(folder):
    return json.loads((folder / "run.json").read_text())


def test_it_says_what_runs_on_what(tmp_path):
    run = RunFolder(tmp_path / "new")
    run_id = run.start(WHAT, resuming=False)
    found = record(tmp_path / "new")
    assert found["id"] == run_id == run.id
    assert len(run_id) == 8
    assert (found["status"], found["reason"], found["ended"]) == ("running", None, None)
    assert all(found[key] == getattr(WHAT, key) for key in ("choices", "hardware", "data", "model"))
    assert found["versions"]["torch"] == torch.__version__
    assert found["pid"] == os.getpid()
    assert found["command"] == shlex.join(sys.orig_argv)


def test_it_says_how_it_ended(tmp_path):
    run = RunFolder(tmp_path)
    run.start(WHAT, resuming=False)
    run.finish("halted", "10 steps in a row", {"val/loss": math.nan, "train/loss": 1.5})
    found = record(tmp_path)
    assert (found["status"], found["reason"]) == ("halted", "10 steps in a row")
    assert found["final"] == {"val/loss": "NaN", "train/loss": 1.5}
    assert found["ended"] >= found["started"]
    assert math.isnan(run.read()["final"]["val/loss"])


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    first = RunFolder(tmp_path)
    first.start(WHAT, resuming=False)
    first.finish("finished", None, {})
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path).start(WHAT, resuming=False)
    assert str(caught.value) == (
        f"hydra.run.dir={tmp_path} already holds run {first.id} (finished): continue it with resume=auto, or choose "
        "another hydra.run.dir"
    )
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_lock_file_that_is_deleted_lets_no_second_run_in(tmp_path):
    first = RunFolder(tmp_path)
    first.start(WHAT, resuming=False)
    (tmp_path / ".lock").unlink()
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()}"):
        RunFolder(tmp_path).start(WHAT, resuming=True)
    first.finish("finished", None, {})
    assert RunFolder(tmp_path).start(WHAT, resuming=True) == first.id


def test_a_path_that_no_record_could_name_is_refused_before_the_run(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    with pytest.raises(ConfigError, match=r"hydra.run.dir=.*\\udcff is no valid UTF-8") as caught:
        RunFolder(Path(folder)).start(WHAT, resuming=False)
    str(caught.value).encode()
    assert not os.listdir(tmp_path)


def test_metrics_without_a_readable_run_json_are_a_run_too(tmp_path):
    (tmp_path / "run.json").write_text('{"id": "abc')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="already holds run"):
        RunFolder(tmp_path).start(WHAT, resuming=False)
    assert RunFolder(tmp_path).start(WHAT, resuming=True)


def test_a_refusal_without_an_id_is_no_run(tmp_path):
    (tmp_path / "run.json").write_text('{"id": null, "status": "failed"}')
    RunFolder(tmp_path).start(WHAT, resuming=False)
    assert record(tmp_path)["status"] == "running"


def test_a_continued_run_is_the_same_run(tmp_path):
    first = RunFolder(tmp_path)
    first.start(WHAT, resuming=True)  # resume=auto on a first start
    started = record(tmp_path)["started"]
    assert record(tmp_path)["resumed"] == []
    first.finish("preempted", "SIGTERM", {})
    for times in (1, 2):
        again = RunFolder(tmp_path)
        assert again.start(WHAT, resuming=True) == first.id
        found = record(tmp_path)
        assert (found["status"], found["reason"], found["started"]) == ("running", None, started)
        assert len(found["resumed"]) == times


def test_gpu_hours_are_summed_over_the_starts_also_over_one_that_was_killed(tmp_path, monkeypatch):
    clock = iter((100.0, 100.0 + 1800))
    monkeypatch.setattr(run_folder, "monotonic", lambda: next(clock))
    about = dataclasses.replace(WHAT, start={"gpus": 4, "slurm": {"job": "17"}})
    first = RunFolder(tmp_path)
    first.start(about, resuming=False)
    assert "gpu_hours" not in record(tmp_path)
    first.finish("preempted", "SIGTERM", {"gpu/energy_kwh": 1.5, "gpu/utilization": 0.5, "val/loss": 2.0})
    (start,) = record(tmp_path)["starts"]
    assert record(tmp_path)["gpu_hours"] == 4 * 0.5
    assert {name: start[name] for name in ("gpus", "slurm", "hours", "energy_kwh", "utilization")} == {
        **about.start,
        "hours": 0.5,
        "energy_kwh": 1.5,
        "utilization": 0.5,
    }
    clock = iter((0.0, 0.0, 3600.0))
    killed = RunFolder(tmp_path)
    killed.start(about, resuming=True)
    assert record(tmp_path)["gpu_hours"] == 2
    (tmp_path / "metrics.jsonl").touch()
    began = datetime.fromisoformat(record(tmp_path)["starts"][-1]["time"]).timestamp()
    os.utime(tmp_path / "metrics.jsonl", (began + 900, began + 900))
    killed._release()
    last = RunFolder(tmp_path)
    last.start(about, resuming=True)
    assert record(tmp_path)["gpu_hours"] == pytest.approx(4 * 0.75)
    last.finish("finished", None, {})
    assert record(tmp_path)["gpu_hours"] == pytest.approx(4 * 1.75)
    assert [("energy_kwh" in start) for start in record(tmp_path)["starts"]] == [True, False, False]


def test_without_gpus_there_are_no_gpu_hours(tmp_path):
    run = RunFolder(tmp_path)
    run.start(dataclasses.replace(WHAT, start={"gpus": 0}), resuming=False)
    run.finish("finished", None, {})
    assert "gpu_hours" not in record(tmp_path)


def test_it_is_written_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    run = RunFolder(tmp_path)
    run.start(WHAT, resuming=False)
    before = (tmp_path / "run.json").read_bytes()
    assert record(tmp_path)["status"] == "running"

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(metrics.os, "fsync", full)
    run.finish("finished", None, {})
    assert (tmp_path / "run.json").read_bytes() == before
    assert "still says running (No space left on device)" in capsys.readouterr().err


def test_an_open_reader_keeps_the_complete_old_record(tmp_path):
    run = RunFolder(tmp_path)
    run.start(WHAT, resuming=False)
    with open(tmp_path / "run.json") as reader:
        run.finish("finished", None, {})
        assert json.load(reader)["status"] == "running"
    assert record(tmp_path)["status"] == "finished"


def test_git_is_the_commit_of_the_checkout_itself(tmp_path):
    assert git(tmp_path) is None

    def run(*words):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True
        )
        return done.stdout.decode().strip()

    run("init", "-q")
    assert git(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("1")
    (tmp_path / "inner").mkdir()
    run("add", "file")
    run("commit", "-qm", "one")
    assert git(tmp_path) == {"commit": run("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("2")
    assert git(tmp_path) == {"commit": run("rev-parse", "HEAD"), "dirty": True}
    assert git(tmp_path / "inner") is None  # installed inside the checkout of another project
    assert git(tmp_path / "absent") is None


TEXT = {"name": "stdlib", "files": 3, "train_tokens": 100, "hash": "aaaa"}


@pytest.mark.parametrize(
    "now",
    [
        TEXT | {"name": "moved"},
        {**TEXT},
    ],
    ids=["another path", "the same"],
)
def test_a_resumed_run_may_read_the_same_data_from_another_path(tmp_path, now):
    check_same_data(TEXT, now, tmp_path)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        (TEXT, TEXT | {"hash": "bbbb"}),
        (TEXT, {"name": "digits", "train": 7, "sha256": "cccc"}),
        ({"name": "mine", "keys": {"path": "a"}}, {"name": "mine", "keys": {"path": "b"}}),
    ],
    ids=["other content", "another data set", "other keys"],
)
def test_a_resumed_run_with_other_data_is_refused(tmp_path, earlier, now):
    with pytest.raises(
        ConfigError, match=r"was trained on .* pass the same data, or start a new run with resume=none"
    ) as error:
        check_same_data(earlier, now, tmp_path)
    assert str(error.value).endswith(
        f"to fine-tune on other data: init_from={tmp_path}, a new run with a fresh optimizer"
    )


def test_a_new_run_and_one_recorded_before_keys_were_are_not_compared(tmp_path):
    check_same_data({}, TEXT, tmp_path)
    check_same_data({"name": "mine"}, {"name": "mine", "keys": {"path": "a"}}, tmp_path)


def test_a_refused_resume_leaves_the_folder_free(tmp_path):
    first = RunFolder(tmp_path)
    first.start(Description(choices={}, hardware={}, data=TEXT), resuming=False)
    first.finish("preempted", None, {})
    with pytest.raises(ConfigError, match="was trained on"):
        RunFolder(tmp_path).start(Description(choices={}, hardware={}, data=TEXT | {"hash": "bbbb"}), resuming=True)
    assert record(tmp_path)["data"] == TEXT
    RunFolder(tmp_path).start(Description(choices={}, hardware={}, data=TEXT), resuming=True)


def test_changed_keys_are_kept_by_every_later_resume(tmp_path):
    first = RunFolder(tmp_path)
    first.start(Description(choices={}, hardware={}, data=TEXT), resuming=False)
    first.change(20, {"steps": [20, 30]})
    first.finish("finished", None, {})
    again = RunFolder(tmp_path)
    again.start(Description(choices={}, hardware={}, data=TEXT), resuming=True)
    again.change(30, {"steps": [30, 40]})
    assert [each["keys"]["steps"] for each in record(tmp_path)["changes"]] == [[20, 30], [30, 40]]


def test_changes_of_steps_that_a_rollback_undoes_hold_from_the_state_it_restores(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start(Description(choices={}, hardware={}, data=TEXT), resuming=False)
    folder.change(5, {"seed": [0, 1]})
    folder.change(20, {"steps": [20, 30], "optimizer.lr": [1, 2]})
    folder.change(30, {"steps": [30, 40], "optimizer.lr": [2, 1]})
    folder.went_back(30)
    assert [change["step"] for change in record(tmp_path)["changes"]] == [5, 20, 30]
    folder.went_back(10)
    assert record(tmp_path)["changes"] == [
        {"step": 5, "keys": {"seed": [0, 1]}},
        {"step": 10, "keys": {"steps": [20, 40]}},
    ]


def test_a_change_on_top_of_another_keeps_it_and_one_in_its_place_does_not(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start(Description(choices={}, hardware={}, data=TEXT), resuming=False)
    folder.change(8, {"steps": [20, 30]})
    folder.change(8, {"seed": [0, 1]}, on_top=True)
    assert [[*change["keys"]] for change in record(tmp_path)["changes"]] == [["steps"], ["seed"]]
    folder.change(8, {"steps": [20, 40]})
    assert record(tmp_path)["changes"] == [{"step": 8, "keys": {"steps": [20, 40]}}]
