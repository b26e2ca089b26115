"""A full disk costs checkpoints, never the run; and no run is ever resumed from a half-written checkpoint."""

import ctypes
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stabletrain.checkpoint import reader, writer
from stabletrain.checkpoint.checkpoints import NoCheckpoints
from stabletrain.checkpoint.folder import find
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import Metrics, read_jsonl
from stabletrain.tracking.run_folder import Description, RunFolder
from tests.checkpoint.given import FILES, Run
from tests.runs import ROOT, TINY_GPT, command

ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]
WHAT = Description(choices={}, hardware={}, data={})
CHOSEN = ["hydra.run.dir=run", "checkpoint.every=3", "eval_every=3", "log_every=1", "steps=9"]

# ------------------------------------------------------------------------------- any call of the system's fails


class Failing:
    """Makes the `at`-th of the calls that write a checkpoint fail, and all later ones."""

    def __init__(self, monkeypatch, at: int, number: int, times: int = 1) -> None:
        self.at, self.number, self.times, self.calls = at, number, times, 0
        for owner, name in ((os, "fsync"), (Path, "mkdir"), (Path, "rename")):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))
        monkeypatch.setattr(writer, "open", self._opened, raising=False)

    def _refuse(self) -> None:
        self.calls += 1
        if self.at <= self.calls < self.at + self.times:
            raise OSError(self.number, os.strerror(self.number))

    def _wrapped(self, function):
        def called(*arguments, **options):
            self._refuse()
            return function(*arguments, **options)

        return called

    def _opened(self, path, mode):
        self._refuse()
        file = open(path, mode)  # noqa: SIM115
        write = file.write

        class Handle:
            def __enter__(handle):
                return handle

            def __exit__(handle, *_):
                file.close()

            def write(handle, piece):
                try:
                    self._refuse()
                except OSError:
                    write(piece[: len(piece) // 2])
                    raise
                write(piece)

            def flush(handle):
                file.flush()

            def fileno(handle):
                return file.fileno()

        return Handle()


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_a_disk_that_stays_full_is_said_once_and_once_when_it_is_not(tmp_path, monkeypatch, capfd, number):
    run = Run(tmp_path, keep=5)
    run.save(10)
    with monkeypatch.context() as patch:
        Failing(patch, 2, number, times=1 << 30)
        for step in (20, 30, 40):
            run.save(step)
    [line] = capfd.readouterr().err.splitlines()
    assert line == (
        f"stabletrain: the checkpoint of step 20 was not written ({os.strerror(number)}): training goes on, earlier "
        "checkpoints are kept"
    )
    assert run.checkpoints.failed == 3
    assert run.checkpoints.unsaved() == (
        f"the last state could not be saved ({os.strerror(number)}): the newest on the disk is of step 10; writes that "
        "failed: 3"
    )
    assert run.newest().step == 10
    for step in (50, 60):
        run.save(step)
    assert capfd.readouterr().err == "stabletrain: checkpoints are written again, from step 50 on\n"
    assert run.checkpoints.unsaved() is None
    assert [kind for kind, _, _ in run.events] == ["checkpoint", "checkpoint_failed", "checkpoint", "checkpoint"]
    assert run.steps() == [10, 50, 60]


def test_where_nothing_could_be_written_it_says_so_at_the_end(tmp_path, monkeypatch):
    run = Run(tmp_path)
    Failing(monkeypatch, 1, errno.ENOSPC, times=1 << 30)
    run.save(10)
    run.save(20)
    assert run.checkpoints.unsaved() == (
        "the last state could not be saved (No space left on device): no checkpoint of this run is left; writes that "
        "failed: 2"
    )
    assert NoCheckpoints().unsaved() is None


def keep_from_renaming(monkeypatch, name):
    """A folder of that name is busy: nothing can rename or delete it."""
    rename = Path.rename

    def kept(path, target):
        if path.name == name:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", kept)


def test_what_cannot_be_removed_is_said_once_and_does_no_harm(tmp_path, monkeypatch, capfd):
    run = Run(tmp_path)
    run.save(10)
    keep_from_renaming(monkeypatch, "step-00000010")
    for step in (20, 30, 40, 50):
        run.save(step)
    assert run.steps() == [10, 40, 50]
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"stabletrain: {run.path(10)} is no longer needed and cannot be deleted (Device or resource busy"
    )


def test_the_state_that_the_run_is_at_stays_beside_a_later_healthy_one(tmp_path):
    run = Run(tmp_path, keep=1)
    run.save(30)
    run.checkpoints.rewind(20)  # none at or before step 20 is healthy, so that of step 30 is spared
    run.save(20, healthy=False)
    assert run.steps() == [20, 30]


def test_what_a_rollback_made_obsolete_takes_no_other_checkpoints_place(tmp_path, monkeypatch):
    run = Run(tmp_path, keep=1)
    run.save(30)
    keep_from_renaming(monkeypatch, "step-00000030")
    run.save(20)  # the run is at step 20 again, and cannot delete what it had saved later
    assert run.steps() == [20, 30]
    monkeypatch.undo()
    run.save(25)
    assert run.steps() == [25]


@pytest.fixture
def small_files():
    """Files over 64 KiB cannot be written: the kernel refuses as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.usefixtures("small_files")
def test_a_file_the_kernel_refuses_costs_the_checkpoint_and_not_the_run(tmp_path, capfd, asynchronous):
    run = Run(tmp_path, asynchronous=asynchronous)
    run.save(10)
    for step in (20, 30):
        run.save(step, tree={"model": {"w": torch.zeros(1 << 16)}})
    run.checkpoints.wait()
    assert [(kind, step) for kind, step, _ in run.events] == [("checkpoint", 10), ("checkpoint_failed", 20)]
    assert [path.name for path in run.folder.iterdir()] == ["step-00000010"]
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert f"the checkpoint of step 20 was not written ({os.strerror(errno.EFBIG)}): training goes on" in printed
    run.save(40)
    run.checkpoints.wait()
    assert run.newest().step == 40


# ---------------------------------------------------------------------------- the folder goes away under a run


def test_a_run_folder_that_is_deleted_is_made_again(tmp_path, capfd):
    run, metrics, record = Run(tmp_path / "run"), Metrics(tmp_path / "run"), RunFolder(tmp_path / "run")
    record.start(WHAT, resuming=False)
    run.save(10)
    metrics.log(10, {})
    shutil.rmtree(tmp_path / "run")
    assert run.checkpoints.newest() is None
    metrics.log(20, {})
    run.save(20)
    metrics.log(21, {})
    record.finish("finished", None, {})
    assert run.newest().step == 20
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [20, 21]
    assert record.read()["status"] == "finished"
    first, second = capfd.readouterr().err.splitlines()
    assert "metrics.jsonl was deleted: it is created again, without the earlier lines" in first
    assert f"{run.folder} was deleted with all its checkpoints: recreated it for the checkpoint of step 20" in second


def test_a_file_in_the_folders_place_costs_checkpoints_until_it_is_gone(tmp_path, capfd):
    run = Run(tmp_path)
    run.save(10)
    shutil.rmtree(run.folder)
    run.folder.write_text("mine")
    for step in (20, 30):
        run.save(step)
        run.checkpoints.rewind(step)
    assert run.checkpoints.newest() is None
    [line] = capfd.readouterr().err.splitlines()
    assert "the checkpoint of step 20 was not written (Not a directory: " in line
    assert run.folder.read_text() == "mine"
    run.folder.unlink()
    run.save(40)
    assert run.newest().step == 40


def test_a_rewriting_that_fails_leaves_the_metrics_as_they_are(tmp_path, monkeypatch, capfd):
    metrics = Metrics(tmp_path)
    for step in range(3):
        metrics.log(step, {})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        metrics.mark(1, 99)
    assert "the lines after step 1 could not be marked as rolled back" in capfd.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]
    metrics.mark(1, 99)
    metrics.log(3, {})
    assert [line.get("rolled_back", False) for line in read_jsonl(tmp_path / "metrics.jsonl")] == [
        False, False, True, False
    ]  # fmt: skip


def test_half_a_line_that_cannot_be_taken_back_is_mended_by_the_next(tmp_path, monkeypatch, capfd):
    metrics, write = Metrics(tmp_path), os.write
    metrics.log(1, {})

    def refused(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, line: write(file, line[:9]))
        patch.setattr(os, "ftruncate", refused)
        metrics.log(2, {})
        metrics.log(3, {})
    assert not (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    metrics.log(4, {})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 4]
    lost, again = capfd.readouterr().err.splitlines()
    reason = "[Errno 5] Input/output error"
    assert f"metrics.jsonl cannot be written ({reason}): lines are lost from here on, training continues" in lost
    assert "metrics.jsonl is written again; lost lines: 2" in again


def test_a_closed_record_is_not_written(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.close()
    metrics.close()
    with pytest.raises(ValueError, match=r"metrics.jsonl is closed"):
        metrics.log(1, {})


# --------------------------------------------------------------------------------------------- at the start

BLOCKED = {
    "run": lambda folder: folder.write_text("mine"),
    "run/checkpoints": lambda folder: (folder.parent.mkdir(), folder.write_text("mine")),
    "run/metrics.jsonl": lambda folder: folder.mkdir(parents=True),
    "run/events.jsonl": lambda folder: folder.mkdir(parents=True),
    "run/run.json": lambda folder: folder.mkdir(parents=True),
    "run/.lock": lambda folder: folder.mkdir(parents=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BLOCKED)
def test_a_run_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path, what):
    BLOCKED[what](tmp_path / what)
    done = command(*TINY_GPT, *CHOSEN, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("stabletrain: ")
    assert done.stderr.count("\n") == 1
    assert Path(what).name in done.stderr
    assert "hydra.run.dir" in done.stderr


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_checkpoints_that_cannot_be_written_are_refused_before_the_first_step(tmp_path, monkeypatch, number):
    (tmp_path / "checkpoints").mkdir()
    for at in (1, 2, 3, 4):
        with monkeypatch.context() as patch:
            Failing(patch, at, number)
            with pytest.raises(ConfigError) as caught:
                Run(tmp_path)
        assert str(caught.value) == (
            f"no checkpoint can be written to {tmp_path / 'checkpoints'} ({os.strerror(number)}): fix this, choose "
            "another hydra.run.dir, or train without checkpoints: checkpoint=off"
        )
        assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_run_that_did_not_start_leaves_what_the_folder_said(tmp_path, monkeypatch, capfd):
    first = RunFolder(tmp_path)
    first.start(WHAT, resuming=False)
    first.finish("finished", None, {})
    before, refused = (tmp_path / "run.json").read_bytes(), RunFolder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(ConfigError, match=f"hydra.run.dir={tmp_path} cannot be written .*full"):
            refused.start(WHAT, resuming=True)
        assert (tmp_path / "run.json").read_bytes() == before
    again = RunFolder(tmp_path)
    again.start(WHAT, resuming=True)  # the lock was given free
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        again.abandon("too full")  # with an error of its own under way
    assert "still says running" in capfd.readouterr().err


# --------------------------------------------------------------------------------------------- real disks


def in_a_small_world(script: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs a shell script in its own mount namespace: its mounts are invisible to others and end with it."""
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    probe = "mount -t tmpfs -o size=1m tmpfs disk"
    folder.joinpath("disk").mkdir()
    if (
        shutil.which("unshare") is None
        or subprocess.run([*alone, "sh", "-c", probe], cwd=folder, check=False, capture_output=True).returncode
    ):
        pytest.skip("this system lets no test mount a file system")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*alone, "sh", "-ec", script], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )


TRAIN = " ".join(
    [sys.executable, str(ROOT / "train.py"), *TINY_GPT, *CHOSEN, "checkpoint.keep=50", "steps=30"]
).replace("hydra.run.dir=run", "hydra.run.dir=disk/run")


@pytest.mark.slow
def test_training_goes_on_when_the_disk_is_full_and_continues_when_it_is_not(tmp_path):
    script = f"""
    mount -t tmpfs -o size=1m tmpfs disk
    {TRAIN} 2> first.err || echo $? > code
    cp -r disk/run full
    mount -o remount,size=64m disk
    {TRAIN} resume=auto steps=33 2> second.err
    cp -r disk/run done
    """
    ran = in_a_small_world(script, tmp_path)
    first, second = ((tmp_path / f"{name}.err").read_text() for name in ("first", "second"))
    assert ran.returncode == 0, ran.stderr + first + second
    refused = [line for line in first.splitlines() if "was not written (No space left on device" in line]
    assert len(refused) == 1, first
    assert "Traceback" not in first
    assert "val loss" in ran.stdout
    assert (tmp_path / "code").read_text() == "1\n", "it has trained to its end, but nothing has the result"
    assert "the last state could not be saved (No space left on device" in first.splitlines()[-1]
    kept = sorted(path.name for path in (tmp_path / "full" / "checkpoints").iterdir())
    newest = int(kept[-1].removeprefix("step-"))
    assert kept == [f"step-{step:08d}" for step in range(0, newest + 1, 3)]  # the first is the guard's
    assert 3 <= newest < 30
    for name in kept:
        reader.verify(tmp_path / "full" / "checkpoints" / name)
    for name in ("metrics.jsonl", "events.jsonl"):
        for line in (tmp_path / "full" / name).read_text().splitlines():
            json.loads(line)
    assert f"resumed after step {newest}, from" in ran.stdout
    assert find(tmp_path / "done").step == 33
    steps = [line["step"] for line in read_jsonl(tmp_path / "done" / "metrics.jsonl") if "train/loss" in line]
    assert steps[-33 + newest :] == list(range(newest + 1, 34))
    assert json.loads((tmp_path / "done" / "run.json").read_text())["status"] == "finished"


READ_ONLY = r"""
import os, subprocess
from pathlib import Path
from stabletrain.tracking.metrics import Metrics
from stabletrain.tracking.run_folder import Description, RunFolder
from tests.checkpoint.given import Run

folder = Path("disk/run").absolute()
run, metrics, record = Run(folder, keep=9), Metrics(folder), RunFolder(folder)
record.start(Description(choices={}, hardware={}, data={}), resuming=False)

def train(*steps):
    for step in steps:
        metrics.log(step, {})
        run.save(step)

def mount(how):
    subprocess.run(["mount", "-o", f"remount,{how}", "disk"], check=True)

train(10)
files = metrics._metrics._file, metrics._events._file
metrics.close()  # no disk becomes read-only by a command while a file on it is open for writing; one that is ill does
record._release()
mount("ro")
metrics._metrics._file, metrics._events._file = (os.open("/dev/full", 1) for _ in files)
train(20, 30)
run.checkpoints.rewind(15)
print(run.newest().step, run.checkpoints.failed)
record.finish("failed", "still there", {})
mount("rw")
train(40)
print(run.newest().step)
record.finish("finished", None, {})
print(*run.steps())
"""


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_costs_what_is_written_meanwhile(tmp_path):
    script = "mount -t tmpfs -o size=4m tmpfs disk; " + f"{sys.executable} -W ignore driver.py"
    (tmp_path / "driver.py").write_text(READ_ONLY)
    ran = in_a_small_world(script, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["10 2", "40", "10 40"]
    says = [
        "lines are lost from here on, training continues",
        "the checkpoint of step 20 was not written (Read-only file system",
        "still says running (",
        "is written again; lost lines: 2",
        "checkpoints are written again, from step 40 on",
    ]
    lines = ran.stderr.splitlines()
    assert len(lines) == len(says), ran.stderr
    for line, words in zip(lines, says, strict=True):
        assert words in line


def test_a_read_only_disk_is_refused_in_one_line(tmp_path):
    script = f"mount -t tmpfs -o size=4m tmpfs disk; mkdir disk/run; mount -o remount,ro disk; {TRAIN}"
    ran = in_a_small_world(script, tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "Read-only file system" in ran.stderr
    assert "hydra.run.dir" in ran.stderr


PERMISSIONS = r"""
import os, sys
from pathlib import Path
from tests.checkpoint.given import Run

run = Run(Path(sys.argv[1]), keep=9)
run.save(10)
run.save(20)
os.chmod(run.path(20) / "model.safetensors", 0)
print(run.preferred().step)
os.chmod(run.folder, 0o500)
run.save(30)
run.save(40)
os.chmod(run.folder, 0)
print(run.checkpoints.newest())
run.save(50)
os.chmod(run.folder, 0o700)
os.chmod(run.path(20) / "model.safetensors", 0o600)
run.save(60)
print(*run.steps(), run.preferred().step)
"""


def without_privileges() -> None:
    """Takes from root what lets it read and write everything."""
    if os.geteuid() == 0:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            if ctypes.CDLL(None, use_errno=True).prctl(24, capability, 0, 0, 0) != 0:  # PR_CAPBSET_DROP
                raise OSError(ctypes.get_errno(), "prctl")


@pytest.mark.slow
def test_permissions_that_are_lost_cost_checkpoints_until_they_are_back(tmp_path):
    words = [sys.executable, "-W", "ignore", "-c", PERMISSIONS, str(tmp_path)]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=without_privileges)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["10", "None", "10 20 60 60"]
    says = [
        "step-00000020: model.safetensors cannot be read (Permission denied)",
        "the checkpoint of step 30 was not written (Permission denied",
        "checkpoints cannot be read (Permission denied)",
        "checkpoints are written again, from step 60 on",
    ]
    lines = ran.stderr.splitlines()
    assert len(lines) == len(says), ran.stderr
    for line, words in zip(lines, says, strict=True):
        assert words in line


def test_every_file_is_there_and_no_other(run):
    run.save(10)
    assert sorted(path.name for path in run.path(10).iterdir()) == sorted(FILES)
    assert [path.name for path in run.folder.iterdir()] == ["step-00000010"]
