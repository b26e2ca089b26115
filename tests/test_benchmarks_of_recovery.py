"""The benchmarks of recovery, start and growth run and measure what they claim; no test checks an absolute speed."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from stabletrain.checkpoint.checkpoints import Checkpoints
from stabletrain.trainer.saved_states import SavedStates
from tests import forkserver
from tests.clocks import ToldClock
from tests.runs import ROOT, python

pytestmark = pytest.mark.slow

TINY = ["--size", "tiny", "--rounds", "1", "--device", "cpu"]


@pytest.fixture
def benchmark(monkeypatch):
    """Returns a function that imports a module of `benchmarks/`, with its own folder on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def tiny(benchmark):
    """The overrides of a tiny GPT."""
    (overrides,) = benchmark("recovery").TINY.values()
    return (*overrides, "device=cpu", "precision=fp32")


def test_it_starts_as_a_script(tmp_path):
    done = python(str(ROOT / "benchmarks" / "recovery.py"), "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--json" in done.stdout


@pytest.fixture
def in_forks(benchmark, monkeypatch):
    """Has the commands of a benchmark run in forks; what is killed is the fork, not the process that stands for it."""
    first_step = benchmark("first_step")
    started, python = first_step.started, forkserver.python()

    def fork(command, cwd):
        process = started((python, *command[1:]), cwd)
        process.kill = lambda: os.kill(forkserver.command_of(process.pid), signal.SIGKILL)
        return process

    monkeypatch.setattr(first_step, "started", fork)


def test_a_benchmark_writes_what_it_promises_and_resumes_from_the_same_step_a_run_that_is_killed_late(
    benchmark, in_forks, tmp_path, monkeypatch, capsys
):
    recovery, to_a_step = benchmark("recovery"), benchmark("first_step").to_a_step

    def late(command, cwd, file, step=1):
        return to_a_step(command, cwd, file, 6 if file.name == "events.jsonl" else step)

    monkeypatch.setattr(recovery, "to_a_step", late)
    monkeypatch.setattr(benchmark("first_step"), "LIMIT", 60.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recovery.py", *TINY, "--json", "results.json"])
    recovery.main()
    written = json.loads((tmp_path / "results.json").read_text())
    values = {each["what"]: each["values"] for each in written["results"]}
    assert {"snapshot", "checkpoint", "rollback from memory", "rollback from disk", "diagnosis, spike"} <= {*values}
    assert [len(values[f"{what} to the first step"]) for what in ("start", "resume")] == [1, 1]
    assert written["targets"].keys() == {"recovery/rollback", "recovery/diagnosis"}, "the others are of 124 M"
    said = capsys.readouterr().out
    assert all(f"| {each} |" in said for each in values)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("owner", "name", "shows_in", "not_in"),
    [
        (SavedStates, "take_snapshot", "snapshot", "checkpoint"),
        (Checkpoints, "save", "checkpoint", "snapshot"),
        (SavedStates, "find", "rollback from disk", "snapshot"),
        (Checkpoints, "rewind", "rollback from memory", "checkpoint"),
    ],
)
def test_what_takes_long_shows_where_it_belongs(benchmark, tiny, tmp_path, monkeypatch, owner, name, shows_in, not_in):
    recovery, measuring, clock = benchmark("recovery"), benchmark("measuring"), ToldClock()
    monkeypatch.setattr(owner, name, clock.slow(getattr(owner, name), 5.0))
    with measuring.silence():
        (turn,) = recovery.stalls(tmp_path, tiny, clock, 1)
    assert turn[shows_in] > 5 > turn[not_in]


def test_a_command_that_ends_otherwise_is_no_measurement(benchmark, tmp_path):
    first_step = benchmark("first_step")
    with pytest.raises(AssertionError, match="ended with 3, not 0"):
        first_step.to_the_end([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, 0)
    with pytest.raises(RuntimeError, match="ended with 3 before step 1"):
        first_step.to_a_step([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, tmp_path / "metrics.jsonl")


def test_a_run_is_timed_to_its_step_and_ended_there(benchmark, tmp_path):
    line = 'print(\'{"step": 1, "x": 0}\', file=open("metrics.jsonl", "w"), flush=True)'
    program = f"import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(0.3); {line}; time.sleep(1e6)"
    begun = time.perf_counter()
    taken = benchmark("first_step").to_a_step([sys.executable, "-c", program], tmp_path, tmp_path / "metrics.jsonl")
    assert 0.3 < taken.wall < time.perf_counter() - begun
    assert 0 <= taken.cpu < taken.wall
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_exponents_are_those_of_the_larger_sizes(benchmark):
    growth = benchmark("growth")
    sizes = (1, 2, 4, 8)
    assert growth.exponent(sizes, [50.0, *(3.0 * size**1.7 for size in sizes[1:])]) == pytest.approx(1.7)


def test_a_set_of_ten_to_the_nine_tokens_takes_no_room_and_is_read_at_its_end_too(benchmark, tmp_path):
    long_data = benchmark("long_data")
    folder = long_data.made(tmp_path / "long", 10**9)
    assert sum(512 * file.stat().st_blocks for file in folder.iterdir()) < 10**6
    tokens = long_data.Tokens(str(folder), 256, seed=0)
    assert max(int(tokens.batch(step, 16, "train").ids.max()) for step in range(50)) > 9 * 10**8


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_the_script_is_clean():
    done = subprocess.run(["shellcheck", str(ROOT / "benchmarks" / "gpu.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "tpu"], "--device tpu is neither cpu nor cuda"),
        (["--only", "tests,speed"], "--only speed is none of its parts: card compiled"),
        *((["a", "b"], "usage:"), (["--fast"], "usage:")),
    ],
)
def test_the_script_refuses_what_it_does_not_know(tmp_path, options, said):
    script = str(ROOT / "benchmarks" / "gpu.sh")
    done = subprocess.run(["bash", script, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert not [*tmp_path.iterdir()]


STUB = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
[[ $* != *fp8.py* ]] || printf 'left out, no time: width %s\\n' 768 4096
[[ $* != *overhead.py* ]] || exit 3
"""
"""Takes Python's place: notes what it is called with, fails as one benchmark, and has no time as another."""


@pytest.fixture
def scripted(tmp_path):
    """Runs a copy of the script on a GPU that a stub pretends; returns the result, the table's rows and the calls."""
    stub, script, calls = tmp_path / "stub", tmp_path / "benchmarks" / "gpu.sh", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    script.parent.mkdir()

    def run(text, *options):
        script.write_text(text)
        environment = {**os.environ, "PYTHON": str(stub), "CALLS": str(calls), "SECONDS": "1000"}
        asked = ["bash", str(script), *options, str(tmp_path / "results")]
        done = subprocess.run(asked, capture_output=True, text=True, env=environment)
        rows = [line.split(" | ") for line in (tmp_path / "results" / "table.md").read_text().splitlines()[2:]]
        return done, {row[0][2:]: row[2] for row in rows if len(row) == 4}, calls.read_text().splitlines()

    return run


def test_the_script_runs_every_part_and_reports_the_failed_one(scripted):
    done, verdicts, calls = scripted((ROOT / "benchmarks" / "gpu.sh").read_text())
    assert done.returncode == 1
    assert {name: verdict for name, verdict in verdicts.items() if verdict != "ran"} == {
        "overhead": "FAILED, code 3",
        "fp8": "ran without width 768; width 4096",
    }
    named = ["card", "throughput", "tests", "overhead", "fp8", "recovery", "graphs", "operations", "images_per_second"]
    named += ["head", "memory", "start", "growth", "compiled"]
    assert list(verdicts) == named
    assert calls[-1] == f"docs/results.py --card {done.args[-1]}"
    for name in named:
        assert any(f"benchmarks/{name}.py" in call or f"/{name}.xml --all -m gpu" in call for call in calls), name


def test_of_named_parts_only_these_run(scripted):
    done, verdicts, calls = scripted((ROOT / "benchmarks" / "gpu.sh").read_text(), "--only", "compiled,head")
    assert done.returncode == 0
    assert verdicts == {"head": "ran", "compiled": "ran"}
    assert [call.split()[0] for call in calls if "--budget" in call or "-m gpu" in call] == ["benchmarks/head.py", "-m"]


def test_a_part_that_the_ten_minutes_do_not_reach_is_reported(scripted):
    text = (ROOT / "benchmarks" / "gpu.sh").read_text()
    assert text.count("total=600") == 1
    done, verdicts, calls = scripted(text.replace("total=600", "total=20"))
    assert done.returncode == 1
    assert set(verdicts.values()) == {"not run: the 20 s are over"}
    assert not any("--device" in call for call in calls if "targets.py" not in call)


def test_at_the_end_of_its_budget_a_benchmark_begins_no_round_and_no_model(benchmark, monkeypatch, capsys):
    measuring, clock = benchmark("measuring"), ToldClock()
    monkeypatch.setattr(measuring.time, "monotonic", lambda: clock.time)
    budget = measuring.Budget(100)

    def step(number):
        clock.time += 9
        return 1.0

    assert budget.begins("first")
    assert len(measuring.in_turns({"a": step}, 50, 1, budget.share(2))["a"]) == 5, (
        "half of it, and one round to warm up"
    )
    assert len(measuring.in_turns({"a": step}, 50, 1, budget.share(1))["a"]) == 5, "the rest"
    assert not budget.begins("second")
    assert budget.left_out == ["second"]
    assert "left out, no time: second" in capsys.readouterr().out
    assert len(measuring.in_turns({"a": step}, 50, 1, budget.share(1))["a"]) == 1, "a round at least"
