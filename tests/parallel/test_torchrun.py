"""torchrun and `train.py`, as a user types them: killed or stopped ranks, one writer, each message printed once."""

import json
import os
import shlex
import signal
import subprocess

import pytest
import torch

from stabletrain.tracking.metrics import read_jsonl
from tests import forkserver
from tests.conftest import HAS_BESIDE
from tests.devices import CARD
from tests.parallel.launches import finish, forked, performed, ranks_of, start, trained, until
from tests.reliability.ends import everything, metrics
from tests.runs import ROOT, TINY_GPT

pytestmark = pytest.mark.timeout(600)

STEPS = 120
RUN = [
    *[*TINY_GPT, "model.dropout=0.1", "forensics=off", "monitors=none", f"steps={STEPS}"],
    *("checkpoint.every=10", "eval_every=40", "log_every=1", "precision=fp32"),
]
KINDS = ("ddp", "fsdp")
CASES = {kind: {"overrides": [*RUN, f"parallel={kind}"]} for kind in KINDS}
FORCED = "forcefully exiting"
"""What torchrun says of a rank that has not ended by itself half a minute after another one did."""


@pytest.fixture(scope="module")
def whole(shared_place):
    """Run folders of undisturbed runs."""
    performed(shared_place / "undisturbed_two", 2, CASES)
    return shared_place / "undisturbed_two"


def launched(tmp_path, *overrides):
    return start(2, str(ROOT / "train.py"), *RUN, f"hydra.run.dir={tmp_path / 'run'}", *overrides, cwd=tmp_path)


def resumed(tmp_path, *overrides):
    """Continues a run on forked ranks, and returns what they print; torchrun starts the one after Ctrl-C."""
    (logs := tmp_path / "resumed").mkdir()
    words = [str(ROOT / "train.py"), *RUN, f"hydra.run.dir={tmp_path / 'run'}", "resume=auto", *overrides]
    forked(2, *words, cwd=tmp_path, logs=logs)
    return "".join(file.read_text() for file in logs.glob("rank*.out"))


def same_end(one, other):
    """Bits of the last checkpoints, and every line of the metrics."""
    ends = [everything(max((folder / "checkpoints").glob("step-*"))) for folder in (one, other)]
    assert ends[0] == ends[1]
    assert metrics(one) == metrics(other)


def begun(folder, lines=15):
    """Whether so many lines of metrics are written."""
    file = folder / "metrics.jsonl"
    return file.exists() and file.read_bytes().count(b"\n") >= lines


def record(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow
def test_torchrun_starts_the_installed_command(tmp_path):
    typed = [*RUN[:-3], "log_every=1", "parallel=ddp", "steps=4", f"hydra.run.dir={tmp_path / 'run'}"]
    done = finish(start(2, "-m", "stabletrain", "train", *typed, cwd=tmp_path))
    assert done.returncode == 0, done.stderr
    assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["final"]["steps"]) == ("finished", 4)
    assert ("next     torchrun --nproc_per_node=2 -m stabletrain train -m " in done.stdout) == HAS_BESIDE
    refused = finish(start(2, "-m", "stabletrain", "train", "stepz=3", cwd=tmp_path))
    assert refused.stderr.count("stabletrain: stepz: there is no such key; did you mean steps?") == 1


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_that_the_ranks_cannot_use_is_one_message(tmp_path, device):
    done = trained(2, *RUN, f"device={device}", cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if "stabletrain: " in line]
    if device == "cuda:0":
        expected = "stabletrain: device=cuda:0 with 2 ranks: "
    elif torch.cuda.device_count() < 2:
        expected = f"stabletrain: device=cuda: {'2 ranks on' if torch.cuda.device_count() else 'this machine has 0'}"
    else:
        pytest.skip("this machine has a card for each rank")
    assert done.returncode == 1
    assert [line[: len(expected)] for line in lines] == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("device", [CARD])
@pytest.mark.parametrize("kind", KINDS)
def test_strict_determinism_on_cards_needs_no_variable_of_the_user(tmp_path, monkeypatch, kind, device):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    done = trained(
        *(1, *RUN, f"device={device}", f"parallel={kind}", "determinism=strict", "compile=false", "steps=2"),
        *("warmup=none", f"hydra.run.dir={tmp_path / 'run'}"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "run")["hardware"]["device"] == "cuda:0"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "killed"), [("ddp", 1), ("fsdp", 0)])
def test_a_rank_that_is_killed_ends_all_and_the_run_is_continued(tmp_path, whole, kind, killed):
    process = launched(tmp_path, f"parallel={kind}")
    until(lambda: begun(tmp_path / "run"), process)
    process_killed = ranks_of(process)[killed]
    os.kill(process_killed, signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 1
    assert FORCED not in done.stderr, "the other rank has ended by itself"
    assert f"[rank {1 - killed}] stabletrain: rank {killed} of 2 (process {process_killed} on " in done.stderr
    assert f"[rank {1 - killed}] Traceback" not in done.stderr
    assert done.stderr.count("continue  torchrun ") == 1
    if killed:  # else no process is left to write
        found = record(tmp_path / "run")
        assert found["status"] == "failed"
        assert found["reason"].startswith(f"rank 1 of 2 (process {process_killed} on ")
        assert "has ended without an error message: it was killed" in found["reason"]
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert f"rank      : {killed} " in root
    assert "SIGKILL" in root
    again = resumed(tmp_path, f"parallel={kind}")
    assert again.count("resumed after step") == 1
    same_end(tmp_path / "run", whole / kind)


@pytest.mark.slow
def test_a_rank_whose_device_waits_for_a_killed_one_ends_with_the_same_message(tmp_path):
    done = finish(start(2, "-m", "tests.parallel.stuck", *RUN, f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path))
    assert done.returncode == 1
    assert FORCED not in done.stderr, "the other rank has ended by itself"
    assert "[rank 0] stabletrain: rank 1 of 2 (process " in done.stderr
    assert done.stderr.count("continue  torchrun ") == 1
    found = record(tmp_path / "run")
    assert found["status"] == "failed"
    assert "has ended without an error message: it was killed" in found["reason"]


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "killed"), [("ddp", 0), ("fsdp", 1)])
def test_killed_in_the_middle_of_a_checkpoint(tmp_path, whole, kind, killed):
    process = launched(tmp_path, f"parallel={kind}", "faults=kill", "faults.at=[50]", f"faults.rank={killed}")
    done = finish(process)
    assert done.returncode == 1
    assert f"[rank {1 - killed}] stabletrain: rank {killed} of 2 (process " in done.stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not (checkpoints / "step-00000050").exists()
    if killed == 0:  # else rank 0 may have time to clear it away
        assert any(checkpoints.glob(".step-00000050.tmp-*")), "half-written"
    resumed(tmp_path, f"parallel={kind}")
    same_end(tmp_path / "run", whole / kind)
    assert not any(checkpoints.glob(".step-*"))


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, whole):
    process = launched(tmp_path, "parallel=fsdp")
    until(lambda: begun(tmp_path / "run"), process)
    os.kill(ranks_of(process)[1], signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 1, "torchrun's own code for ranks that did not end with 0"
    assert "exitcode  : 75" in done.stderr
    assert "exitcode  : -" not in done.stderr, "every rank ended by itself"
    assert done.stderr.count("the state is saved") >= 1
    assert done.stderr.count("continue  torchrun --nproc_per_node=2 ") == 1
    assert record(tmp_path / "run")["status"] == "preempted"
    (event,) = [each for each in read_jsonl(tmp_path / "run" / "events.jsonl") if each["event"] == "preempt"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{event['step']:08d}").exists()
    resumed(tmp_path, "parallel=fsdp")
    same_end(tmp_path / "run", whole / "fsdp")


@pytest.mark.slow
def test_ctrl_c_saves_and_the_line_continue_is_a_command_that_goes_on(tmp_path, whole):
    """torchrun passes the signal on; its ranks are in sessions of their own, which the terminal does not reach."""
    process = start(2, str(ROOT / "train.py"), *RUN, "parallel=ddp", cwd=tmp_path)
    until(lambda: any(begun(folder) for folder in tmp_path.glob("outputs/*/*")), process)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    (folder,) = tmp_path.glob("outputs/*/*")
    assert record(folder)["status"] == "preempted"
    assert record(folder)["reason"].endswith("the state is saved")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("continue  ")]
    words = shlex.split(line.removeprefix("continue  "))
    assert words[0] == "torchrun"
    environment = {**os.environ, **forkserver.shims(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [forkserver.python(), "-m", "torch.distributed.run", *words[1:]]
    again = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert ("next     torchrun --nproc_per_node=2 " in again.stdout) == HAS_BESIDE
    same_end(folder, whole / "ddp")


@pytest.mark.slow
def test_an_error_of_one_rank_is_said_by_it_and_told_by_the_other(tmp_path):
    failing = "model._target_=tests.parallel.given.FailsOnRankOne"
    done = finish(launched(tmp_path, failing))
    assert done.returncode == 1
    assert "[rank 1] ValueError: the third sequence is too sad" in done.stderr
    assert "[rank 0] stabletrain: rank 1 of 2 has ended: ValueError: the third sequence is too sad" in done.stderr
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert "rank      : 1 " in root
    assert "the third sequence is too sad" in root
    assert record(tmp_path / "run")["reason"] == "rank 1 of 2 has ended: ValueError: the third sequence is too sad"


@pytest.mark.slow
def test_a_refusal_is_said_once(tmp_path):
    done = trained(2, *RUN, f"hydra.run.dir={tmp_path / 'run'}", "batch_size=5", cwd=tmp_path)
    assert done.returncode == 1
    [said] = [line for line in done.stderr.splitlines() if "stabletrain: " in line]
    assert said.startswith(
        "stabletrain: batch_size=5 does not divide among 2 ranks x grad_accum_steps=1; fix: batch_size=4 or 6"
    )
    assert "exitcode  : 2" in done.stderr


@pytest.mark.slow
def test_one_rank_speaks_and_one_writes(tmp_path):
    done = trained(2, *RUN[:-4], "steps=6", "checkpoint.every=3", "eval_every=3", "log_every=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for once in ("stabletrain · gpt_nano", "val loss ", "guard    6 updates in 6 steps", "run      outputs/"):
        assert done.stdout.count(once) == 1, once
    assert not [line for line in done.stderr.splitlines() if "Warning" in line], done.stderr
    (folder,) = tmp_path.glob("outputs/*/*")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs"]
    assert [line["tick"] for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read_jsonl(folder / "metrics.jsonl") if "val/loss" in line] == [3, 6]
    steps = [event["step"] for event in read_jsonl(folder / "events.jsonl") if event["event"] == "checkpoint"]
    assert steps == sorted(set(steps))
    assert record(folder)["status"] == "finished"
