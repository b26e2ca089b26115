"""`slurm/launch.sh --pack`: several runs in one task, each by itself, and one code for all of them."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.beside.slurm.given import options
from tests.runs import ROOT

FILE = ROOT / "slurm" / "pack.py"


@pytest.fixture(scope="module")
def pack():
    """`slurm/pack.py` as a module."""
    spec = importlib.util.spec_from_file_location("slurm_pack", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [
        ([0, 0], 0),
        ([0, 1, 3, 2], 3),
        ([1, 75, 0], 75),  # the saved run goes on, whatever became of the others
        ([-9, 75], 75),
        ([-9, 1], 137),
        ([-15, -9], 143),
        ([4, 1], 4),
        ([], 0),
    ],
)
def test_the_tasks_code_is_that_which_lets_the_runs_go_on(pack, codes, wanted):
    assert pack.code_of(codes) == wanted


STAND_IN = """\
import os, signal, sys, time
print("words", sys.argv[1:], os.environ["STABLETRAIN_PACKED"], flush=True)
if "fail=1" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the signal may come before this process has ended
    sys.exit("it failed")
if "wait=1" in sys.argv:
    asked = []
    for each in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(each, lambda *_: asked.append(1))
    print("up", flush=True)
    end = time.monotonic() + 60
    while not asked and time.monotonic() < end:
        time.sleep(0.01)
    sys.exit(75)
"""
"""Stands for train.py."""


def start(place, runs, **environment):
    """Starts pack.py with the words of each run, by its folder; its own session is the task."""
    (place / "train.py").write_text(STAND_IN)
    words = []
    for folder, overrides in runs.items():
        (place / folder).mkdir(exist_ok=True)
        words += ["--", folder, *overrides]
    return subprocess.Popen(
        [sys.executable, str(FILE), sys.executable, "train.py", "--option", *words],
        cwd=place,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("told", [signal.SIGUSR2, signal.SIGTERM])
def test_a_run_that_fails_ends_no_other_and_each_has_its_own_log(tmp_path, told):
    task = start(tmp_path, {"0": ["fail=1"], "1": ["wait=1", "a='b c'"]})
    logs = [tmp_path / folder / "slurm.log" for folder in "01"]
    deadline = time.monotonic() + 60
    while not all(log.exists() and word in log.read_text() for log, word in zip(logs, ("failed", "up"), strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(task.pid, told)  # as Slurm does: to all processes of the task
    said, _ = task.communicate(timeout=60)
    assert (task.returncode, said) == (75, "slurm    0: code 1\nslurm    1: code 75\n")
    assert logs[0].read_text().endswith("it failed\n")
    words = ["--option", "wait=1", "a='b c'", "hydra.run.dir='1'", "resume=auto"]
    assert logs[1].read_text() == f"words {words} 2\nup\n"


def test_a_task_that_queued_again_starts_only_what_is_not_over(tmp_path):
    records = {"0": {"status": "finished"}, "1": {"status": "failed", "exit_code": 2}, "2": {"status": "preempted"}}
    for folder, record in records.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.json").write_text(json.dumps(record))
    runs = {folder: [] for folder in records}
    task = start(tmp_path, runs, SLURM_RESTART_COUNT="1")
    said, _ = task.communicate(timeout=60)
    assert task.returncode == 2, "the run that failed at the first start counts"
    assert "slurm    1: code 2, at an earlier start\n" in said
    assert [(tmp_path / folder / "slurm.log").exists() for folder in runs] == [False, False, True]
    start(tmp_path, runs, SLURM_RESTART_COUNT="0").communicate(timeout=60)
    assert [(tmp_path / folder / "slurm.log").exists() for folder in runs] == [True, True, True]


def test_a_task_of_the_script_has_the_folders_and_overrides_of_its_runs(launch):
    typed = ["--dry-run", "--pack", "2", "--parallel-jobs", "3", "-m", "wandb.name='a b','$HOME','it\\'s'"]
    code, out, _ = launch(*typed, "hydra.sweep.dir=s")
    assert code == 0
    assert options(out)["array"] == "0,2%3"
    case = out[out.index("case ") : out.index("folder=")]
    told = {}
    for task in (0, 2):
        words = f'SLURM_ARRAY_TASK_ID={task}\n{case}printf "%s\\0" "${{packed_folders[@]}}" = "${{runs[@]}}"'
        told[task] = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True).stdout.split(
            "\0"
        )
    assert told[0] == ["s/0", "s/1", "=", "s/0", "wandb.name='a b'", "--", "s/1", "wandb.name='$HOME'", ""]
    assert told[2] == ["s/2", "=", "s/2", "wandb.name='it\\'s'", ""]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--pack", "2"], "--pack 2: without -m there is one run: leave it out, or add -m"),
        (["--pack", "2", "--test", "-m", "seed=0,1"], "--pack 2: --test is one run: leave one of them out"),
        (["--pack", "0", "-m"], "--pack: '0' is not a whole number of at least 1"),
        (["--pack", "2", "--nodes", "2", "-m", "seed=0,1"], "--pack 2: on any a run has 2 devices"),
        (["--pack", "2", "--gpu", "a100", "-m", "seed=0,1"], "--pack 2: on a100 a run has 4 devices"),
    ],
)
def test_what_cannot_share_a_device_is_refused(launch, typed, message):
    code, _, err = launch("--dry-run", *typed)
    assert code == 2
    assert message in err
