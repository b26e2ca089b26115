"""What is loaded is what was saved, and a checkpoint is complete or absent, whenever the process is killed."""

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from stabletrain.checkpoint import writer
from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.checkpoints import NoCheckpoints
from stabletrain.checkpoint.folder import find
from stabletrain.errors import ConfigError
from stabletrain.records import TrainState
from tests.checkpoint.given import FILES, Run, flip


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


def test_tensors_begin_at_a_multiple_of_eight_bytes(run):
    """Programs that map a file into memory read numbers of eight bytes there."""
    for width in range(1, 9):
        run.checkpoints.save(
            10,
            {"model": {"w" * width: torch.ones(2)}, "optimizer": {"state": {}}, "step": 10},
            info={},
            healthy=True,
            val_loss=None,
        )
        header = int.from_bytes((run.path(10) / "model.safetensors").read_bytes()[:8], "little")
        assert header % 8 == 0


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("model", "w"), math.nan, "w is not finite"),
        (("model", "w"), -math.inf, "w is not finite"),
        (("optimizer", "state", "w", "exp_avg"), math.inf, "optimizer/w/exp_avg is not finite"),
        (("optimizer", "state", "w", "exp_avg_sq"), -1e-9, "optimizer/w/exp_avg_sq is negative"),
        (("optimizer", "state", "w", "exp_avg"), -1.0, None),
        (("model", "count"), 1, None),
    ],
)
def test_a_state_with_one_impossible_value_is_unsound(place, value, why):
    moments = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    tree = {
        "model": {"w": torch.ones(3), "count": torch.zeros(3, dtype=torch.int64)},
        "optimizer": {"state": {"w": moments}},
    }
    assert writer.unsound(tree) is None
    at = tree
    for name in place:
        at = at[name]
    at[1] = value
    assert writer.unsound(tree) == why


def test_a_link_is_deleted_and_what_it_points_to_is_not(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    writer.delete(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["real"]
    assert (tmp_path / "real" / "file").exists()


def test_the_seconds_of_a_checkpoint_are_those_that_its_writing_took(run):
    began = time.perf_counter()
    run.save(10)
    ((_, _, fields),) = [event for event in run.events if event[0] == "checkpoint"]
    assert 0 <= fields["seconds"] <= round(time.perf_counter() - began, 3)


def test_what_can_be_deleted_of_a_folder_is_deleted(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / "folder" / name).mkdir(parents=True)
        (tmp_path / "folder" / name / "file").touch()
    rmdir = os.rmdir

    def refusing(path, **where):
        if os.path.basename(path) == "b":
            raise PermissionError(path)
        rmdir(path, **where)

    monkeypatch.setattr(os, "rmdir", refusing)
    writer.delete(tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["b"]


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
    write, may_write = writer.write, threading.Event()
    monkeypatch.setattr(writer, "write", lambda *a, **k: may_write.wait() and write(*a, **k))
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


@pytest.mark.parametrize("replacement", ["complete", "damaged", "missing"])
def test_what_a_killed_process_left_is_tidied_up_and_no_state_lost(run, replacement):
    run.save(10)
    run.save(20)
    (run.folder / ".step-00000030.tmp-1").mkdir()
    (run.folder / ".step-00000010.gone-1").write_text("half deleted")
    set_aside = run.folder / ".step-00000020.old-1"
    shutil.copytree(run.path(20), set_aside)
    (set_aside / "note").touch()
    if replacement == "missing":
        shutil.rmtree(run.path(20))
    elif replacement == "damaged":
        (run.path(20) / "manifest.json").unlink()
    writer.tidy(run.folder)
    assert run.steps() == [10, 20]
    assert (run.path(20) / "note").exists() == (replacement != "complete")
    assert run.newest().step == 20


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
from stabletrain.checkpoint.checkpoints import Checkpoints

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


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_a_checkpoint_to_continue_from(tmp_path):

    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "survived 12 kills" in done.stdout
    assert "skipped" not in done.stderr


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
