"""A full disk, a kill while a checkpoint is written, and an unreachable W&B."""

import signal

import pytest
import torch

from stabletrain.beside.faults import DiskFull, LostWandb
from stabletrain.checkpoint.checkpoints import Checkpoints
from stabletrain.checkpoint.reader import verify
from stabletrain.errors import ConfigError
from stabletrain.tracking.wandb import NoWandb, Wandb
from stabletrain.trainer.loop import train
from tests.beside.faults.given import CADENCE, built, ran
from tests.runs import TINY_GPT, command

MODEL, TRAINING, MANIFEST = "model.safetensors", "training.safetensors", "manifest.json"


@pytest.mark.slow(unless=lambda asynchronous: asynchronous == "true")
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk_costs_that_checkpoint_and_no_other(tmp_path, asynchronous):
    given = [*TINY_GPT, *CADENCE, f"checkpoint.asynchronous={asynchronous}"]
    _, events = ran(tmp_path, *given, "faults=disk_full", "faults.at=[8]")
    saved = [(e["event"], e["step"]) for e in events if e["event"].startswith("checkpoint")]
    assert ("checkpoint_failed", 8) in saved
    assert "No space left on device" in next(e["reason"] for e in events if e["event"] == "checkpoint_failed")
    paths = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [path.name for path in paths] == [f"step-{step:08d}" for step in (0, 4, 6, 12)]  # 0 is the guard's
    assert all(verify(path).healthy for path in paths)
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_the_disk_is_full_when_the_second_file_is_half_written(tmp_path, monkeypatch):
    seen = {}

    def look(path, **_):
        seen.update({file.name: file.stat().st_size for file in path.iterdir()} if ".tmp-" in path.name else {})

    given = [*TINY_GPT, *CADENCE, "checkpoint.asynchronous=false"]
    with built(tmp_path, *given, "faults=disk_full", "faults.at=[8]") as job:
        happen = DiskFull.happen
        monkeypatch.setattr(DiskFull, "happen", lambda self, path, step: (look(path.parent), happen(self, path, step)))
        train(job)
    whole = {file.name: file.stat().st_size for file in (tmp_path / "checkpoints" / "step-00000012").iterdir()}
    assert set(seen) == {MODEL, TRAINING}
    assert seen[MODEL] == whole[MODEL]
    assert 0.4 < seen[TRAINING] / whole[TRAINING] <= 0.5  # what is still buffered is not on the disk


@pytest.mark.slow
def test_a_killed_run_leaves_hidden_files_only_and_ends_as_one_that_was_not_killed(tmp_path):
    given = [*TINY_GPT, *CADENCE, "checkpoint.keep=1"]
    killed = command(*given, "faults=kill", "faults.at=[8]", "hydra.run.dir=run", cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = {path.name: path for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert {name for name in left if not name.startswith(".")} == {"step-00000000", "step-00000006"}
    hidden = [path for name, path in left.items() if name.startswith(".step-00000008.tmp-")]
    assert len(hidden) == 1
    assert TRAINING in {file.name for file in hidden[0].iterdir()}
    assert MANIFEST not in {file.name for file in hidden[0].iterdir()}
    resumed = command("resume=run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    whole, _ = ran(tmp_path / "whole", *given)
    end = verify(tmp_path / "run" / "checkpoints" / "step-00000012").load()
    clean = whole.state.model.state_dict()
    assert all(torch.equal(value, end["model"][name]) for name, value in clean.items())


@pytest.mark.parametrize("kind", ["disk_full", "kill"])
def test_a_fault_in_checkpoints_is_refused_without_checkpoints(tmp_path, kind):
    with (
        pytest.raises(ConfigError, match="checkpoint=off"),
        built(tmp_path, *TINY_GPT, "checkpoint=off", f"faults={kind}"),
    ):
        pass


@pytest.mark.slow
def test_the_faults_of_a_plan_each_interrupt_their_checkpoint(tmp_path):
    plan = "faults.faults=[{kind:disk_full,at:[4]},{kind:disk_full,at:[8]}]"
    _, events = ran(tmp_path, *TINY_GPT, *CADENCE, "faults=plan", plan)
    assert [e["step"] for e in events if e["event"] == "checkpoint_failed"] == [4, 8]


def test_a_fault_in_checkpoints_of_a_users_own_is_refused():
    class Own(Checkpoints):
        pass

    with pytest.raises(ConfigError, match="has no effect on those of Own"):
        DiskFull(at=[4]).checkpoints(Own(4, 1, False, False))


class Library:
    """A stand-in for a W&B run."""

    id = "abc"

    def __init__(self):
        self.logged, self.ended = [], []

    def log(self, metrics):
        self.logged.append(metrics["step"])

    def alert(self, title, text):
        self.logged.append(title)

    def finish(self, exit_code):
        self.ended.append(exit_code)


def test_wandb_is_unreachable_from_a_tick_on_and_training_continues(capsys):
    library, wandb = Library(), Wandb("offline", "project")
    lost = LostWandb(at=[5]).wandb(wandb)
    lost._run = library
    assert isinstance(lost, NoWandb)
    for tick in (3, 4, 5, 6):
        lost.log(tick - 2, {"tick": tick})  # after a rollback
    lost.alert("too", "late")
    lost.summary({})
    lost.finish(0)
    assert library.logged == [1, 2]
    assert library.ended == [0]
    assert capsys.readouterr().err.count("W&B may miss parts of this run") == 1


def test_wandb_that_is_unreachable_from_the_start_is_not_started(tmp_path, capsys):
    wandb = LostWandb(at=[0]).wandb(Wandb("offline", "project"))
    assert wandb.start(tmp_path, "id", {}) == "id"
    wandb.log(1, {"tick": 1})
    wandb.finish(0)
    assert "wandb is unreachable (init)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_wandb_fault_is_refused_without_wandb(tmp_path):
    with pytest.raises(ConfigError, match="wandb=disabled"), built(tmp_path, *TINY_GPT, "faults=wandb"):
        pass
