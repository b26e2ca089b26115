"""The runs that a sweep's command asks for, the runs that are done, and the runs allowed in the sweep's folder."""

import json
import os
import sys

import pytest

from stabletrain.beside.sweep import plan
from stabletrain.beside.sweep.plan import check_belongs, check_same_run, read, shortened, start_sweep, status_of
from stabletrain.cli.finished import finished_run
from stabletrain.config.arguments import parse_arguments
from stabletrain.errors import ConfigError
from tests.beside.sweep.given import RUNS, grid_of, ran, sweep_of

FILES = {
    "config.yaml": "defaults:\n  - _self_\n  - optimizer: adamw\nsteps: 5\nseed: 0\n"
    "hydra:\n  sweep:\n    dir: multirun/now\n",
    "optimizer/adamw.yaml": "lr: 0.1\n",
    "optimizer/sgd.yaml": "lr: 0.2\n",
}
"""Configuration files of a small project."""


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """The `conf/` of a small project whose root is the working directory."""
    for name, text in FILES.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "-m", "seed=0,1"])
    return tmp_path / "conf"


def started(conf, *typed):
    """Returns what a command line starts."""
    return start_sweep(parse_arguments(list(typed)), conf)


# ---- start


def test_every_combination_is_a_run_and_the_sweep_is_recorded(conf, tmp_path):
    sweep, typed = started(conf, "-m", "optimizer=adamw,sgd", "steps=7", "seed=0,1", "hydra.sweep.dir=here")
    assert sweep.runs == [
        [f"optimizer={optimizer}", "steps=7", f"seed={seed}"] for optimizer in ("adamw", "sgd") for seed in (0, 1)
    ]
    assert (sweep.varies, sweep.count, sweep.launcher) == (["optimizer", "seed"], 4, "basic")
    assert sweep.command == "python train.py -m seed=0,1"
    assert typed.value("hydra.sweep.dir") == "here"
    assert typed.value("hydra.output_subdir") == "null"
    record = json.loads((tmp_path / "here" / "sweep.json").read_text())
    assert record["options"] == ["-m"]
    assert record["overrides"] == ["optimizer=adamw,sgd", "steps=7", "seed=0,1"], "without what names the folder"
    again = read(sweep.folder)
    assert again == sweep


def test_the_folder_is_the_configurations_where_none_is_typed(conf):
    sweep, typed = started(conf, "-m", "seed=0,1")
    assert str(sweep.folder) == typed.value("hydra.sweep.dir") == "multirun/now"


def test_the_users_own_config_folder_is_searched(conf, tmp_path):
    (tmp_path / "own" / "optimizer").mkdir(parents=True)
    (tmp_path / "own" / "optimizer" / "mine.yaml").write_text("lr: 0.3\n")
    sweep, _ = started(conf, "-m", "--config-dir", "own", "optimizer=mine,sgd")
    assert sweep.runs == [["optimizer=mine"], ["optimizer=sgd"]]


OTHERS = [["--config-name", "other"], ["--config-name=other"], ["-cn=other"], ["--config-path=elsewhere"]]
OTHERS += [["-cp", "elsewhere"]]
"""Each spelling of the options that select another configuration."""


@pytest.mark.parametrize("options", OTHERS, ids=" ".join)
def test_another_configuration_is_taken_in_every_spelling(conf, tmp_path, options):
    (tmp_path / "elsewhere").mkdir()
    for file in (conf / "other.yaml", tmp_path / "elsewhere" / "config.yaml"):
        file.write_text("seed: 0\nhydra:\n  sweep:\n    dir: from_other\n")
    sweep, _ = started(conf, "-m", *options, "seed=0,1")
    assert str(sweep.folder) == "from_other"


@pytest.mark.parametrize("typed", [["seed=0,1"], ["-m", "seed=0,1", "--cfg", "job"], ["-m", "--help"]])
def test_a_command_that_runs_no_sweep_is_left_alone(conf, tmp_path, typed):
    assert started(conf, *typed) == (None, parse_arguments(typed))
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]


def test_a_folder_of_another_sweep_is_refused_and_keeps_its_record(conf, tmp_path):
    ran(tmp_path / "here" / "0", ["seed=0"])
    ran(tmp_path / "here" / "1", ["seed=1"])
    assert started(conf, "-m", "seed=0,1,2", "hydra.sweep.dir=here")[0] is not None, "a longer one goes on"
    before = (tmp_path / "here" / "sweep.json").read_text()
    with pytest.raises(ConfigError, match="holds another sweep: its run 1 is seed=1, which is not that run"):
        started(conf, "-m", "seed=0,7", "hydra.sweep.dir=here")
    assert (tmp_path / "here" / "sweep.json").read_text() == before


def test_a_sweep_grows_by_values_of_its_first_key_only(conf, tmp_path):
    for number, (seed, steps) in enumerate([(0, 5), (0, 6), (1, 5), (1, 6)]):
        ran(tmp_path / "here" / str(number), [f"seed={seed}", f"steps={steps}"])
    assert started(conf, "-m", "seed=0,1,2", "steps=5,6", "hydra.sweep.dir=here")[0].count == 6
    with pytest.raises(ConfigError, match="holds another sweep: its run 2 is seed=1 steps=5"):
        started(conf, "-m", "seed=0,1", "steps=5,6,7", "hydra.sweep.dir=here")


def test_a_folder_that_cannot_be_written_is_refused(conf, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="hydra.sweep.dir=file/below cannot be written"):
        started(conf, "-m", "seed=0,1", "hydra.sweep.dir=file/below")


# ---- what may lie in its folder


def test_a_run_belongs_to_the_sweep_in_its_own_place_only(tmp_path):
    sweep = sweep_of(tmp_path)
    check_belongs(sweep, "2", {"overrides": ["seed=2", "steps=5", "resume=auto"]})
    check_belongs(sweep, "named", {"overrides": RUNS[2]})  # a folder by another name may be any run
    check_belongs(sweep, "2", {})
    check_belongs(sweep._replace(runs=None), "2", {"overrides": ["seed=99"]})  # a search chooses as it goes
    for name, overrides in {"1": RUNS[2], "9": RUNS[2], "named": ["seed=99"]}.items():
        with pytest.raises(ConfigError, match=f"its run {name} is seed="):
            check_belongs(sweep, name, {"overrides": overrides})


def test_a_run_of_other_overrides_is_not_continued(tmp_path):
    ran(tmp_path / "0", ["steps=5", "seed=0"])
    check_same_run(tmp_path / "0", ["seed=0", "steps=5"])
    check_same_run(tmp_path / "nothing", ["seed=1"])
    with pytest.raises(ConfigError, match=r"its run 0 is seed=0, here it would be seed=1: choose another"):
        check_same_run(tmp_path / "0", ["steps=5", "seed=1"])


def test_a_record_that_cannot_be_read_is_none(tmp_path):
    assert read(tmp_path) is None
    for text in ("{", "[]", '{"command": "python train.py"}'):
        (tmp_path / "sweep.json").write_text(text)
        assert read(tmp_path) is None


# ---- which runs are over


@pytest.mark.parametrize(
    ("status", "over"), [("finished", True), ("halted", True), ("failed", False), ("preempted", False)]
)
def test_a_run_with_a_result_is_over(tmp_path, status, over):
    record = ran(tmp_path / "0", RUNS[0], status)
    assert finished_run(tmp_path / "0", RUNS[0], 5) == (record if over else None)
    assert status_of(tmp_path / "0") == status


def test_a_run_of_fewer_steps_or_other_overrides_is_not_over(tmp_path):
    ran(tmp_path / "0", RUNS[0])
    assert finished_run(tmp_path / "0", RUNS[0], 4) is not None
    assert finished_run(tmp_path / "0", RUNS[0], 6) is None
    assert finished_run(tmp_path / "0", RUNS[1], 5) is None
    assert finished_run(tmp_path / "0", RUNS[0], 5, ["halted"]) is None
    assert finished_run(tmp_path / "nothing", RUNS[0], 5) is None
    assert status_of(tmp_path / "nothing") is None


def test_records_are_in_the_order_of_the_runs(tmp_path):
    for name in ("10", "9", "0"):
        ran(tmp_path / name, RUNS[0])
    assert [name for name, _ in sweep_of(tmp_path).records()] == ["0", "9", "10"]


def test_the_arms_that_a_run_has_tried_are_no_runs_of_the_sweep(tmp_path):
    ran(tmp_path / "0", RUNS[0], "finished")
    ran(tmp_path / "0" / "whatif" / "halt-00000009" / "clip", RUNS[0], "halted")
    ran(tmp_path / "a=1" / "0", RUNS[1], "finished")
    assert [name for name, _ in sweep_of(tmp_path).records()] == ["0", "a=1/0"]


# ---- small things


def test_only_what_varies_is_shown_and_long_numbers_are_cut(tmp_path):
    sweep = sweep_of(tmp_path, varies=["optimizer.lr", "data.path"])
    told = sweep.varied(["steps=5", "optimizer.lr=0.004430375245", "data.path=a.long.name"])
    assert told == "optimizer.lr=0.00443 data.path=a.long.name"
    assert shortened("optimizer.lr=0.001") == "optimizer.lr=0.001"
    assert shortened("seed=123456789012") == "seed=123456789012"


@pytest.mark.parametrize("jobs", [0, True, "many", 1.5])
def test_jobs_that_are_no_number_are_refused(jobs):
    with pytest.raises(ConfigError, match="is not a number of runs: use 1 to"):
        plan.check_jobs(grid_of(RUNS, n_jobs=jobs))


def test_more_jobs_than_cores_are_refused(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    for jobs in (1, 3, -1):
        plan.check_jobs(grid_of(RUNS, n_jobs=jobs))
    plan.check_jobs(grid_of(RUNS))  # a launcher that knows no number of jobs
    with pytest.raises(ConfigError, match=r"n_jobs=4 is above the 3 CPU cores here.*n_jobs=3 or fewer"):
        plan.check_jobs(grid_of(RUNS, n_jobs=4))
