"""W&B's own file contains everything that the run logged, and no failure of W&B stops a run."""

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stabletrain.tracking.wandb import NoWandb, Wandb
from tests import forkserver
from tests.tracking.wandb_file import read, read_file

RUNS = textwrap.dedent("""
    import math, os, sys, time
    from pathlib import Path
    from stabletrain.tracking.wandb import Wandb

    def run(number, config, exit_code, rollback):
        wandb = Wandb(mode="offline", project="proof", group="both", tags=("a", "b"))
        folder = Path(sys.argv[1]) / f"run{number}"
        start = time.perf_counter()
        run_id = wandb.start(folder, f"run{number}id", config)
        print("started", run_id, round(time.perf_counter() - start, 2))
        for step in rollback:
            wandb.log(step, {"train/loss": math.nan if step == 3 else 1 / step, "lr": 1e-3})
        wandb.summary({"val/loss": 0.125})
        wandb.alert("halted", "ten steps in a row")
        start = time.perf_counter()
        wandb.finish(exit_code)
        print("finished", round(time.perf_counter() - start, 2))

    run(1, {"optimizer": {"lr": 0.1}, "steps": 7}, 0, [1, 2, 3, 4])
    run(2, {"optimizer": {"lr": 0.2}, "steps": 7}, 3, [1, 2, 3, 2, 3])
""")


def run_python(script: str, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs a script in its own process, because W&B keeps a service running and reads its environment only once."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    clean |= {"HOME": str(folder / "home"), "PYTHONPATH": str(Path(__file__).parents[2])} | environment
    (folder / "home").mkdir(exist_ok=True)
    return forkserver.run(["-c", script, *arguments], folder, clean, timeout=120)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    done = run_python(RUNS, str(folder), folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, done, read(folder / "run1"), read(folder / "run2")


def test_the_config_is_there(two_runs):
    _, _, first, second = two_runs
    assert first["config"] | {"optimizer": {"lr": 0.1}, "steps": 7} == first["config"]
    assert second["config"]["optimizer"] == {"lr": 0.2}
    assert (first["project"], first["group"], first["tags"]) == ("proof", "both", ["a", "b"])


def test_every_point_is_there_with_its_step_and_nan_is_nan(two_runs):
    history = two_runs[2]["history"]
    assert [point["step"] for point in history] == [1, 2, 3, 4]
    assert [point["train/loss"] for point in history if point["step"] != 3] == [1.0, 0.5, 0.25]
    assert math.isnan(history[2]["train/loss"])
    assert two_runs[2]["axes"] == {"step": "", "train/loss": "step", "lr": "step"}


def test_points_whose_step_went_back_are_not_dropped(two_runs):
    assert [point["step"] for point in two_runs[3]["history"]] == [1, 2, 3, 2, 3]


def test_each_run_of_a_process_has_its_own_id_and_exit_code(two_runs):
    _, _, first, second = two_runs
    assert (first["id"], first["exit_code"]) == ("run1id", 0)
    assert (second["id"], second["exit_code"]) == ("run2id", 3)


def test_summary_and_alert_arrive(two_runs):
    assert two_runs[2]["summary"]["val/loss"] == 0.125
    assert two_runs[2]["alerts"] == [("halted", "ten steps in a row")]


def test_it_is_silent_and_stays_in_the_run_folder(two_runs):
    folder, done, _, _ = two_runs
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["started", "finished"] * 2
    assert done.stderr == ""
    assert sorted(path.name for path in folder.iterdir()) == ["home", "run1", "run2"]
    assert [path.name for path in (folder / "run1").iterdir()] == ["wandb"]


def test_a_run_that_never_finished_does_not_swallow_the_next(tmp_path):
    done = run_python(RUNS.replace("wandb.finish(exit_code)", "pass"), str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[::2]] == ["run1id", "run2id"]
    assert len(read(tmp_path / "run2")["history"]) == 5


def test_a_continued_run_keeps_its_id(tmp_path):
    done = run_python(
        RUNS.replace('f"run{number}id"', '"same"').replace('f"run{number}"', '"one"'), str(tmp_path), folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "one").rglob("run-*.wandb"))
    assert [read_file(file)["id"] for file in files] == ["same"] * len(files)
    assert done.stdout.count("started same") == 2


ONLINE = """
import sys
from pathlib import Path
from stabletrain.tracking.wandb import Wandb
wandb = Wandb(mode="online", project="proof")
print(wandb.start(Path(sys.argv[1]), "abcd1234", {}))
wandb.log(1, {"x": 1.0})
wandb.finish(0)
"""


def test_online_without_a_key_warns_once_and_goes_on_offline(tmp_path):
    done = run_python(ONLINE, str(tmp_path), folder=tmp_path)
    assert done.stdout == "abcd1234\n"
    assert done.stderr.count("\n") == 1
    assert (
        "no API key was found; log in with `wandb login`: this run is logged offline; metrics.jsonl has everything"
        in done.stderr
    )
    assert read(tmp_path)["history"][0]["x"] == 1.0


class Broken:
    """A W&B run whose calls all fail."""

    id = "abcd1234"

    def __getattr__(self, name):
        raise OSError(f"no space left for {name}")


def test_any_failure_is_one_warning(tmp_path, monkeypatch, capsys):
    run = Wandb(mode="offline", project="proof")
    monkeypatch.setattr(run, "_begin", lambda *_: Broken())
    assert run.start(tmp_path, None, {}) == "abcd1234"
    run.log(1, {"x": 1.0})
    run.summary({"x": 1.0})
    run.alert("a", "b")
    run.finish(1)
    run.log(2, {})
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("stabletrain: wandb: no space left for summary")


def test_a_library_that_will_not_start_leaves_the_run_without_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    for mode in ("offline", "online"):
        run = Wandb(mode=mode, project="proof")
        assert run.start(tmp_path, "mine", {}) == "mine"
        run.log(1, {"x": 1.0})
        run.finish(0)
        assert capsys.readouterr().err.count("\n") == 1


def test_disabled_does_not_even_import_it():
    script = "import sys; from stabletrain.tracking.wandb import NoWandb; w = NoWandb(); w.log(1, {}); w.finish(0); "
    command = [sys.executable, "-c", script + "print('wandb' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "False\n"
    assert NoWandb().start(Path("nowhere"), "mine", {}) == "mine"
