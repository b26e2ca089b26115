"""A checkpoint is complete or absent, and never trusted before every byte of it is what was written."""

import errno
import itertools
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.records import TrainState
from stabletrain.state import disk
from stabletrain.state.capture import capture
from stabletrain.state.checkpoint import Checkpoints, NoCheckpoints
from stabletrain.state.disk import Checkpoint, UnusableCheckpoint
from stabletrain.state.folder import by_val_loss, find


def tree(step: int) -> dict:
    return {"model": {"w": torch.full((64, 8), float(step))}, "optimizer": {"state": {}}, "step": step}


class Run:
    """Checkpoints of a run folder, and what they reported."""

    def __init__(self, folder: Path, **options) -> None:
        self.events: list[tuple[str, int, dict]] = []
        policy: dict[str, Any] = {"every": 10, "keep": 2, "keep_best": True, "asynchronous": False}
        self.checkpoints = Checkpoints(**(policy | options))
        self.checkpoints.open(folder, lambda *event: self.events.append(event))
        self.folder = folder / "checkpoints"

    def save(self, step, healthy=True, val_loss=None, **kwargs):
        self.checkpoints.save(step, kwargs.get("tree", tree(step)), info={}, healthy=healthy, val_loss=val_loss)

    def newest(self, **options) -> Checkpoint:
        found = self.checkpoints.newest(**options)
        assert found is not None
        return found

    def steps(self):
        return sorted(int(path.name[5:]) for path in self.folder.iterdir())


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_what_is_saved_is_what_is_loaded(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = TrainState(model, torch.optim.AdamW(model.parameters()), step=20)
    model(torch.randn(5, 3)).sum().backward()
    state.optimizer.step()
    info = {"wandb": "abc", "seen": math.inf}
    run.checkpoints.save(20, capture(state, {}), info=info, healthy=True, val_loss=math.nan)
    found = run.newest()
    assert (found.path, found.step, found.healthy, found.info) == (
        run.folder / "step-00000020",
        20,
        True,
        info,
    )
    assert math.isnan(found.val_loss)
    loaded = found.load()
    assert loaded["step"] == 20
    assert loaded["model"].keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded["model"][name], value)
        assert torch.equal(found.load_model()[name], value)
    moments = loaded["optimizer"]["state"]["0.weight"]
    assert torch.equal(moments["exp_avg"], state.optimizer.state[next(model.parameters())]["exp_avg"])


def test_any_program_reads_the_model_by_its_own_names(run):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = TrainState(model, torch.optim.SGD(model.parameters()))
    run.checkpoints.save(10, capture(state, {}), info={}, healthy=True, val_loss=None)
    file = run.folder / "step-00000010" / "model.safetensors"
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other.load_state_dict(safetensors.torch.load_file(file))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask  # others may read it, as far as the user lets them


def test_the_state_may_change_as_soon_as_save_returns(tmp_path):
    run = Run(tmp_path, asynchronous=True)
    live = torch.ones(1 << 20)
    run.checkpoints.save(10, {"model": {"w": live}}, info={}, healthy=True, val_loss=None)
    live.fill_(7.0)
    assert torch.equal(run.newest().load()["model"]["w"], torch.ones(1 << 20))


def test_training_does_not_wait_for_the_disk_but_the_next_save_does(tmp_path, monkeypatch):
    run = Run(tmp_path, asynchronous=True)
    write, may_write = disk.write, threading.Event()
    monkeypatch.setattr(disk, "write", lambda *a, **k: may_write.wait() and write(*a, **k))
    run.save(10)  # would hang here if it waited
    assert not (run.folder / "step-00000010").exists()
    threading.Timer(0.05, may_write.set).start()
    run.save(20)
    assert (run.folder / "step-00000010").exists()
    run.checkpoints.wait()
    assert run.steps() == [10, 20]


def test_due_every_so_many_steps_and_never_at_0(run):
    assert [step for step in range(31) if run.checkpoints.due(step)] == [10, 20, 30]
    assert not any(NoCheckpoints().due(step) for step in range(1000))


# ------------------------------------------------------------------------------------------------ damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FILES = ["model.safetensors", "training.safetensors", "state.json", "manifest.json"]

DAMAGE: dict[str, Callable[[Path], Any]] = {f"flipped-{name}": lambda c, n=name: flip(c / n) for name in FILES}
DAMAGE |= {f"truncated-{name}": lambda c, n=name: os.truncate(c / n, 20) for name in FILES}
DAMAGE |= {f"missing-{name}": lambda c, n=name: (c / n).unlink() for name in FILES}
DAMAGE |= {f"empty-{name}": lambda c, n=name: (c / n).write_bytes(b"") for name in FILES}
DAMAGE |= {
    "foreign-folder": lambda c: (shutil.rmtree(c), c.mkdir(), (c / "notes.txt").write_text("mine")),
    "a-file": lambda c: (shutil.rmtree(c), c.write_text("not a folder")),
    "another-steps": lambda c: (shutil.rmtree(c), shutil.copytree(c.with_name("step-00000010"), c)),
    "other-format": lambda c: rewrite_manifest(c, format=99),
    "edited": lambda c: edit(c / "manifest.json", '"healthy": true', '"healthy": false'),
    "no-object": lambda c: (c / "manifest.json").write_text("[]"),
    "deep": lambda c: (c / "manifest.json").write_text("[" * 100_000),
    "escaping": lambda c: rewrite_manifest(c, files={"../../secret": {"bytes": 1, "sha256": ""}}),
}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def rewrite_manifest(checkpoint: Path, **changes) -> None:
    """As an attacker would: with a checksum that is right."""
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | changes
    del manifest["sha256"]
    manifest["sha256"] = disk._digest(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(run, damage, capsys):
    run.save(10)
    run.save(20)
    DAMAGE[damage](run.folder / "step-00000020")
    run.events.clear()
    assert run.newest().step == 10
    [(kind, step, fields)] = run.events
    assert (kind, step) == ("checkpoint_skipped", 20)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert f"checkpoint skipped: {fields['reason']}" in printed
    assert str(run.folder / "step-00000020") in fields["reason"]


def test_a_damaged_file_is_named(run):
    run.save(10)
    flip(run.folder / "step-00000010" / "training.safetensors")
    with pytest.raises(UnusableCheckpoint, match=r"step-00000010: training.safetensors does not match its checksum"):
        disk.verify(run.folder / "step-00000010")


def test_damage_after_verifying_is_noticed_when_loading(run):
    run.save(10)
    found = run.newest()
    flip(found.path / "model.safetensors")
    with pytest.raises(UnusableCheckpoint, match=r"model.safetensors does not match"):
        found.load()


class Malicious:
    """Unpickling it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("forged", [False, True], ids=["plain", "with a valid manifest"])
def test_nothing_is_ever_unpickled(tmp_path, run, forged):
    mark = tmp_path / "pwned"
    poison = pickle.dumps(Malicious(mark))
    pickle.loads(poison)
    assert mark.exists()  # the poison works
    mark.unlink()
    run.save(10)
    run.save(20)
    run.save(30)
    newest = run.folder / "step-00000030"
    if forged:
        entries = {}
        for name in FILES[:3]:
            (newest / name).write_bytes(poison)
            entries[name] = {"bytes": len(poison), "sha256": disk.hashlib.sha256(poison).hexdigest()}
        rewrite_manifest(newest, files=entries)
    else:
        for name in FILES:
            (newest / name).write_bytes(poison)
    torch.save({"model": Malicious(mark)}, run.folder / "step-00000020" / "model.safetensors")
    run.events.clear()
    assert run.checkpoints.newest() is None  # 10 was rotated out
    assert [(kind, step) for kind, step, _ in run.events] == [("checkpoint_skipped", s) for s in (30, 20)]
    with pytest.raises(ConfigError, match="holds no usable checkpoint"):
        find(tmp_path)
    for path in (newest, run.folder / "step-00000020"):
        with pytest.raises(UnusableCheckpoint):
            disk.verify(path)
        with pytest.raises(UnusableCheckpoint):
            Checkpoint(path, 0, True, None, {}).load()
    assert not mark.exists()


def test_a_skeleton_without_its_tensors_is_no_checkpoint(run):
    run.save(10)
    path = run.folder / "step-00000010"
    skeleton = b'{"model": {"w": {"$tensor": "absent"}}, "training": {}}'
    (path / "state.json").write_bytes(skeleton)
    entry = {"bytes": len(skeleton), "sha256": disk.hashlib.sha256(skeleton).hexdigest()}
    files = json.loads((path / "manifest.json").read_text())["files"]
    rewrite_manifest(path, files=files | {"state.json": entry})
    with pytest.raises(UnusableCheckpoint, match="do not hold a state"):
        disk.verify(path)


# --------------------------------------------------------------------------------------------- retention


def test_the_newest_and_the_best_are_kept(run):
    for step, loss in [(10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5), (50, math.nan)]:
        run.save(step, val_loss=loss)
    assert run.steps() == [20, 40, 50]
    best = run.checkpoints.best()
    assert best is not None
    assert best.step == 20
    assert run.newest().step == 50


@pytest.mark.parametrize("order", list(itertools.permutations([3.0, math.nan, 1.0, -math.inf])))
def test_a_loss_that_is_no_number_is_never_the_best(order):
    known = [Checkpoint(Path(str(i)), i, True, loss, {}) for i, loss in enumerate([*order, None])]
    assert [c.val_loss for c in by_val_loss(known)] == [1.0, 3.0]


def test_without_keep_best_only_the_newest_are_kept(tmp_path):
    run = Run(tmp_path, keep_best=False, keep=1)
    for step in (10, 20, 30):
        run.save(step, val_loss=float(step))
    assert run.steps() == [30]


def test_the_last_healthy_one_outlives_any_number_of_sick_ones(run):
    run.save(10)
    run.save(20)
    for step in range(30, 80, 10):
        run.save(step, healthy=False, val_loss=0.0)
    assert run.steps() == [20, 60, 70]
    assert run.newest().step == 70
    assert run.newest(healthy_only=True).step == 20
    assert run.checkpoints.best() is None


def test_a_damaged_one_does_not_push_out_the_last_whole_one(run):
    run.save(10)
    run.save(20)
    (run.folder / "step-00000020" / "model.safetensors").unlink()
    run.save(30, healthy=False)
    run.save(40, healthy=False)
    assert run.newest(healthy_only=True).step == 10


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["model", "moments"])
def test_weights_or_moments_that_are_not_finite_are_never_healthy(run, where, bad):
    sick = tree(10)
    sick["optimizer"]["state"]["w"] = {"exp_avg": torch.zeros(3)}
    (sick["model"]["w"] if where == "model" else sick["optimizer"]["state"]["w"]["exp_avg"])[2] = bad
    run.save(10, tree=sick)
    assert not run.newest().healthy
    [(kind, _, fields)] = run.events
    assert (kind, fields["healthy"]) == ("checkpoint", False)
    assert fields["reason"] == ("w is not finite" if where == "model" else "optimizer/w/exp_avg is not finite")


def test_a_rollback_forgets_the_future_but_never_the_last_healthy_one(run):
    for step in (10, 20, 30):
        run.save(step)
    run.checkpoints.rewind(20)
    assert run.steps() == [20]
    run.checkpoints.rewind(10)
    assert run.steps() == [20]


def test_a_step_reached_again_is_replaced(run):
    run.save(10, val_loss=1.0)
    run.save(10, val_loss=2.0, tree=tree(11))
    assert run.steps() == [10]
    assert run.newest().val_loss == 2.0
    assert run.newest().load()["step"] == 11


def test_one_set_aside_to_be_replaced_comes_back_and_other_leftovers_go(tmp_path, run):
    run.save(10)
    (run.folder / "step-00000010").rename(run.folder / ".step-00000010.old-1")
    (run.folder / ".step-00000020.tmp-1").mkdir()
    shutil.copytree(run.folder / ".step-00000010.old-1", run.folder / ".step-00000030.gone-1")
    again = Run(tmp_path)
    assert again.steps() == [10]
    assert again.newest().step == 10


# ------------------------------------------------------------------------------------------ the disk fails


@pytest.fixture
def small_disk():
    """Files over 64 KiB cannot be written: the kernel refuses as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path, capfd, asynchronous):
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


def test_a_failure_while_replacing_leaves_the_old_one(run, monkeypatch):
    run.save(10)
    rename, calls = Path.rename, []

    def second_fails(self, target):
        calls.append(self)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    run.save(10, tree=tree(11))
    assert run.events[-1][0] == "checkpoint_failed"
    assert run.steps() == [10]
    assert run.newest().load()["step"] == 10


def test_every_byte_is_on_the_disk_before_the_name_appears(run, monkeypatch):
    order = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle):
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda a, b: order.append(f"-> {b.name}") or rename(a, b))
    run.save(10)
    hidden = f".step-00000010.tmp-{os.getpid()}"
    assert order == [*FILES, hidden, "-> step-00000010", "checkpoints"]


def test_a_mistake_of_the_program_is_no_failing_disk(tmp_path):
    run = Run(tmp_path, asynchronous=True)
    with pytest.raises(TypeError, match="keys must be str"):
        run.save(10, tree={"model": {}, "parts": {1: 2}})
    run.save(20, tree={"model": {"w": torch.zeros(1, dtype=torch.complex128)}})
    with pytest.raises(TypeError, match="complex128"):
        run.checkpoints.wait()


KILLED = r"""
import os, random, signal, sys, time
import torch
from pathlib import Path
from stabletrain.state.checkpoint import Checkpoints

torch.set_num_threads(1)
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
generator = random.Random(0)

def opened():
    checkpoints = Checkpoints(every=1, keep=2, keep_best=True, asynchronous=True)
    checkpoints.open(folder, lambda *event: None)
    return checkpoints

last = 0
for n in range(rounds):
    done, written = os.pipe()
    child = os.fork()
    if child == 0:
        checkpoints, step = opened(), last
        while True:
            step += 1
            for again in (0, 1):  # each step twice: the second replaces the first
                tree = {"model": {f"w{i}": torch.full((1 << 14,), step * 1.0) for i in range(8)}, "step": step}
                checkpoints.save(step, tree, info={"step": step}, healthy=step % 3 != 0, val_loss=1.0 / step)
                checkpoints.wait()
                os.write(written, b"%d\n" % step)
    os.close(written)
    os.read(done, 1)
    time.sleep(generator.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    reported = max([last, *map(int, os.read(done, 1 << 20).split())])
    checkpoints = opened()
    found = checkpoints.newest()
    assert found.step >= reported, (found.step, reported)
    names = sorted(os.listdir(folder / "checkpoints"))
    assert all(name.startswith("step-") for name in names) and len(names) <= 5, names
    tree = found.load()
    assert tree["step"] == found.step == found.info["step"]
    assert all(bool((w == found.step).all()) for w in tree["model"].values())
    assert checkpoints.newest(healthy_only=True) is not None
    assert checkpoints.best() is not None
    last = found.step
print("survived", rounds, "kills, at step", last)
"""


def test_kill_9_at_any_moment_leaves_a_checkpoint_to_continue_from(tmp_path):

    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "survived 12 kills" in done.stdout
    assert "skipped" not in done.stderr


def test_kill_9_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path, run, monkeypatch):
    run.save(10)
    rename = Path.rename

    def killed(self, target):
        rename(self, target)
        raise SystemExit(signal.SIGKILL)

    monkeypatch.setattr(Path, "rename", killed)
    monkeypatch.setattr(disk.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(Path, "exists", lambda self: self.name[0] == "s")  # nor does its clean-up run
    with pytest.raises(SystemExit):
        disk.write(run.folder, tree(11), step=10, info={}, healthy=True, val_loss=None)
    monkeypatch.undo()
    assert not (run.folder / "step-00000010").exists()
    assert Run(tmp_path).newest().load()["step"] == 10


# ------------------------------------------------------------------------------------------ without a run


def test_find_takes_a_run_a_folder_of_checkpoints_or_one_of_them(tmp_path, run):
    run.save(10, val_loss=1.0)
    run.save(20, val_loss=2.0)
    for path in (tmp_path, run.folder, run.folder / "step-00000020"):
        assert find(path).step == 20
    assert find(tmp_path, best=True).step == 10
    shutil.copytree(run.folder / "step-00000020", tmp_path / "mine")
    assert find(tmp_path / "mine").step == 20
    flip(run.folder / "step-00000020" / "state.json")
    assert find(tmp_path).step == 10


def test_find_says_what_is_wrong_where_there_is_none(tmp_path, run):
    with pytest.raises(ConfigError, match=r"holds no usable checkpoint: name a run folder"):
        find(tmp_path)
    run.save(10)
    with pytest.raises(ConfigError, match="no usable checkpoint with a validation loss"):
        find(tmp_path, best=True)
    (run.folder / "step-00000010" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"step-00000010: manifest.json is missing"):
        find(tmp_path)
    with pytest.raises(ConfigError, match="nowhere"):
        find(tmp_path / "nowhere")


@pytest.mark.parametrize("key", ["every", "keep"])
def test_a_number_out_of_bounds_is_refused_by_name(key):
    options: dict[str, Any] = {"every": 1, "keep": 1, "keep_best": True, "asynchronous": True}
    options[key] = 0
    with pytest.raises(ConfigError, match=rf"checkpoint.{key}=0 is below 1.*checkpoint=off"):
        Checkpoints(**options)
