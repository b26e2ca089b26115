"""Any damage to a checkpoint is detected, the one before it is used, and one line names the file and the reason."""

import errno
import functools
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stabletrain.checkpoint import reader
from stabletrain.checkpoint.folder import find, run_of
from stabletrain.checkpoint.reader import Checkpoint, UnusableCheckpoint
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import read_jsonl
from tests.checkpoint.given import FILES, Run, flip, forge, rewrite_manifest, tree
from tests.runs import TINY_GPT, command

CHECKSUM = "does not match its checksum"

# For each damage: what does it to the folder of step 20, beside that of step 10; and what the line says.
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    f"bit-in-{name}": (lambda c, n=name: flip(c / n), f"{name} {CHECKSUM}") for name in FILES[:3]
}
DAMAGE |= {
    f"{name}-cut-by-{lost}": (lambda c, n=name, k=lost: cut(c / n, k), rf"{name} has \d+ bytes, the manifest says \d+")
    for name in FILES[:3]
    for lost in (1, 30)
}
DAMAGE |= {f"missing-{name}": (lambda c, n=name: (c / n).unlink(), f"{name} is missing") for name in FILES}
DAMAGE |= {f"empty-{name}": (lambda c, n=name: (c / n).write_bytes(b""), name) for name in FILES}
DAMAGE |= {f"longer-{name}": (lambda c, n=name: append(c / n), name) for name in FILES}
DAMAGE |= {f"pipe-{name}": (lambda c, n=name: pipe(c / n), f"{name} is not a regular file") for name in FILES}
DAMAGE |= {f"folder-{name}": (lambda c, n=name: folder(c / n), f"{name} is not a regular file") for name in FILES}
DAMAGE |= {
    f"link-loop-{name}": (lambda c, n=name: loop(c / n), f"{name} cannot be read .Too many levels of symbolic links")
    for name in FILES
}
DAMAGE |= {
    "manifest-cut": (lambda c: cut(c / "manifest.json", 1), "manifest.json has unexpected content"),
    "manifest-edited": (lambda c: edit(c / "manifest.json", "true", "false"), f"manifest.json {CHECKSUM}"),
    "manifest-no-object": (lambda c: (c / "manifest.json").write_text("[]"), "manifest.json has unexpected content"),
    "manifest-deep": (lambda c: (c / "manifest.json").write_text("[" * 100_000), "has unexpected content"),
    "manifest-endless": (
        lambda c: os.truncate(c / "manifest.json", 16 * 2**20 + 1),
        "too many for a manifest",
    ),
    "empty-folder": (lambda c: (shutil.rmtree(c), c.mkdir()), "manifest.json is missing"),
    "foreign-folder": (lambda c: (shutil.rmtree(c), c.mkdir(), (c / "a.txt").touch()), "manifest.json is missing"),
    "a-file": (lambda c: (shutil.rmtree(c), c.write_text("not a folder")), "is a file, not a folder"),
    "a-link-to-itself": (lambda c: (shutil.rmtree(c), c.symlink_to(c)), "manifest.json cannot be read"),
    "a-link-to-nothing": (lambda c: (shutil.rmtree(c), c.symlink_to("gone")), "manifest.json is missing"),
    "another-steps": (
        lambda c: (shutil.rmtree(c), shutil.copytree(c.with_name("step-00000010"), c)),
        "its manifest says step 10",
    ),
    "other-format": (
        lambda c: rewrite_manifest(c, format=99),
        "manifest.json has format 99; this version reads 1 and 2",
    ),
    "another-runs": (
        lambda c: rewrite_manifest(c, info={"run": "a2b3c4d5"}),
        "it belongs to run a2b3c4d5, but this is run ours0000",
    ),
}
# With a manifest that is right: forged, or written by another program.
DAMAGE |= {
    "forged-escape": (
        lambda c: rewrite_manifest(c, files={"../../secret": {"bytes": 1, "sha256": ""}}),
        f"manifest.json {CHECKSUM}",
    ),
    "forged-skeleton": (
        lambda c: forge(c, {"state.json": b'{"model": {"w": {"$tensor": "absent"}}, "training": {}}'}),
        "model.safetensors has unexpected content",
    ),
    "forged-skeleton-list": (lambda c: forge(c, {"state.json": b"[]"}), "state.json has unexpected content"),
    "forged-deep-skeleton": (
        lambda c: forge(c, {"state.json": b"[" * 100_000}),
        "state.json has unexpected content",
    ),
}
DAMAGE |= {
    f"forged-header-{kind}": (
        lambda c, h=header: forge(c, {"model.safetensors": h}),
        "model.safetensors has unexpected content",
    )
    for kind, header in {
        "huge": (1 << 62).to_bytes(8, "little") + b"{}",
        "negative": b"\xff" * 8 + b"{}",
        "bomb": (90 << 20).to_bytes(8, "little") + b"{}",
        "no-json": (8).to_bytes(8, "little") + b"\x80\x04K\x01.   ",
        "short": b"\x08\x00",
        "tensor-beyond-the-end": (64).to_bytes(8, "little")
        + b'{"w":{"dtype":"F32","shape":[999999],"data_offsets":[0,3999996]}}'[:64],
    }.items()
}


def cut(path: Path, lost: int) -> None:
    os.truncate(path, path.stat().st_size - lost)


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b" ")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(tmp_path, damage, capfd):
    run = Run(tmp_path, run="ours0000")
    run.save(10)
    run.save(20)
    harm, says = DAMAGE[damage]
    harm(run.path(20))
    run.events.clear()
    assert run.newest().step == 10
    [(kind, step, fields)] = run.events
    assert (kind, step, fields["path"]) == ("checkpoint_skipped", 20, "step-00000020")
    assert fields["reason"].startswith(str(run.path(20)))
    assert re.search(says, fields["reason"])
    assert capfd.readouterr().err == f"stabletrain: checkpoint skipped: {fields['reason']}\n"
    assert run.checkpoints.newest(healthy_only=True).step == 10
    assert run.preferred().step == 10
    assert len(run.events) == 1  # said once
    if damage != "another-runs":  # which without a run of one's own is a checkpoint like any other
        assert find(tmp_path).step == 10
        assert capfd.readouterr().err == f"stabletrain: checkpoint skipped: {fields['reason']}\n"


def test_every_byte_of_a_manifest_counts(run):
    run.save(20, tree={"model": {"w": torch.ones(1)}}, val_loss=1e-05)
    manifest = run.path(20) / "manifest.json"
    content = manifest.read_bytes()
    for byte in range(len(content)):
        for bit in {5, byte % 8}:  # bit 5 makes of 1e-05 1E-05, which is the same number, and not what was written
            flip(manifest, byte, bit)
            with pytest.raises(UnusableCheckpoint, match=r"manifest.json"):
                reader.peek(run.path(20))
            manifest.write_bytes(content)
    assert reader.verify(run.path(20)).val_loss == 1e-05


@pytest.mark.parametrize(
    ("average", "why"),
    [({}, "was trained with averaging=none"), ({"average": {"count": 0, "tensors": {}}}, "from before the first")],
)
def test_why_a_checkpoint_has_no_averages_is_said(tmp_path, average, why):
    run = Run(tmp_path)
    run.save(10, tree=tree(10) | average)
    with pytest.raises(reader.UnusableCheckpoint, match=f"no averaged weights: it .*{why}"):
        run.newest().load_average()


def test_only_what_ranks_wrote_names_the_shapes_of_its_tensors():
    assert reader.shapes_of("model", {"model": {}, "training": {}, "shapes": {"model": {"w": [2, 3]}}}) == {"w": [2, 3]}
    assert reader.shapes_of("model", {"model": {}, "training": {}}) is None


def test_a_manifest_is_rendered_once_for_the_same_bytes(run, monkeypatch):
    """Else each checkpoint of a run would render those of all earlier ones; the test above reads changed bytes."""
    rendered, render = [], reader.render
    monkeypatch.setattr(reader, "render", lambda manifest: rendered.append(manifest["step"]) or render(manifest))
    reader._parsed.cache_clear()
    run.save(10)
    run.save(20)
    for _ in range(3):
        assert [reader.peek(run.path(step)).step for step in (10, 20)] == [10, 20]
    assert rendered == [10, 20]


def test_a_manifest_without_one_of_the_files_is_refused(run):
    run.save(10)
    files = json.loads((run.path(10) / "manifest.json").read_text())["files"]
    for name in files:
        rewrite_manifest(run.path(10), files={each: value for each, value in files.items() if each != name})
        with pytest.raises(reader.UnusableCheckpoint, match="manifest.json does not match its checksum"):
            reader.peek(run.path(10))
    rewrite_manifest(run.path(10), files=files)
    assert reader.peek(run.path(10)).step == 10


def test_damage_after_verifying_is_noticed_when_loading(run):
    run.save(10)
    found = run.newest()
    flip(found.path / "model.safetensors")
    for load in (found.load, found.load_model):
        with pytest.raises(UnusableCheckpoint, match=r"model.safetensors does not match"):
            load()


# ------------------------------------------------------------------------------------------- cannot be read


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_is_passed_over_and_used_again_when_it_can(run, monkeypatch, capfd, name, number):
    run.save(10)
    run.save(20)
    bad = str(run.path(20) / name)

    def refusing(function):
        def called(path, *rest, **options):
            if str(path) == bad:
                raise OSError(number, os.strerror(number), bad)
            return function(path, *rest, **options)

        return called

    monkeypatch.setattr(reader, "open", refusing(open), raising=False)
    monkeypatch.setattr(reader, "read_file", refusing(reader.read_file))
    assert run.newest().step == 10
    assert f"{run.path(20)}: {name} cannot be read ({os.strerror(number)})" in capfd.readouterr().err
    monkeypatch.undo()
    assert run.newest().step == 20
    run.checkpoints.rewind(10)  # it counts again, and so it can be left behind
    assert run.steps() == [10]


def test_a_folder_that_cannot_be_listed_holds_nothing_and_says_so(run, monkeypatch, capfd):
    run.save(10)

    def refused(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", refused)
    assert run.checkpoints.newest() is None
    assert (
        capfd.readouterr().err == f"stabletrain: checkpoint skipped: {run.folder} cannot be read (Permission denied)\n"
    )
    with pytest.raises(
        ConfigError, match=r"holds no usable checkpoint: .*checkpoints cannot be read .Permission denied"
    ):
        find(run.folder)


# ------------------------------------------------------------------------------------------ half a renaming


def test_what_has_a_hidden_name_is_never_read(run):
    run.save(10)
    run.save(20)
    for mark in ("tmp", "old", "gone"):
        shutil.copytree(run.path(20), run.folder / f".step-00000030.{mark}-1")
    shutil.rmtree(run.path(20))
    assert run.newest().step == 10
    assert find(run.folder).step == 10


# -------------------------------------------------------------------------------------------------- foreign


class Malicious:
    """Unpickling it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("forged", [False, True], ids=["plain", "with a valid manifest"])
def test_nothing_is_ever_unpickled(tmp_path, forged):
    mark = tmp_path / "pwned"
    poison = pickle.dumps(Malicious(mark))
    pickle.loads(poison)
    assert mark.exists()  # the poison works
    mark.unlink()
    run = Run(tmp_path)
    run.save(10)
    run.save(20)
    run.save(30)
    if forged:
        forge(run.path(30), dict.fromkeys(FILES[:3], poison))
    else:
        for name in FILES:
            (run.path(30) / name).write_bytes(poison)
    torch.save({"model": Malicious(mark)}, run.path(20) / "model.safetensors")
    run.events.clear()
    assert run.checkpoints.newest() is None  # 10 was rotated out
    assert [(kind, step) for kind, step, _ in run.events] == [("checkpoint_skipped", s) for s in (30, 20)]
    with pytest.raises(ConfigError, match="holds no usable checkpoint"):
        find(tmp_path)
    for path in (run.path(30), run.path(20)):
        with pytest.raises(UnusableCheckpoint):
            reader.verify(path)
        with pytest.raises(UnusableCheckpoint):
            Checkpoint(path, 0, True, None, {}).load()
    assert not mark.exists()


def test_anothers_is_not_of_this_run_but_can_be_asked_for(tmp_path):
    theirs = Run(tmp_path / "theirs", run="theirs00")
    theirs.save(20)
    ours = Run(tmp_path / "ours", run="ours0000")
    ours.save(10)
    shutil.copytree(theirs.path(20), ours.path(20))
    assert ours.newest().step == 10
    assert find(ours.path(20)).info["run"] == "theirs00"
    assert run_of(tmp_path / "theirs") == "theirs00"
    assert run_of(tmp_path) is None


def test_one_that_is_asked_for_by_name_is_not_exchanged_for_another(run):
    run.save(10)
    run.save(20)
    flip(run.path(20) / "training.safetensors")
    with pytest.raises(UnusableCheckpoint, match=rf"step-00000020: training.safetensors {CHECKSUM}"):
        find(run.path(20))
    (run.path(20) / "manifest.json").unlink()
    with pytest.raises(UnusableCheckpoint, match=r"step-00000020: manifest.json is missing"):
        find(run.path(20))


# ---------------------------------------------------------------------------------------- as a user sees it


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that stopped after step 6, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    done = command(*TINY_GPT, *CHOSEN, "steps=6", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


CHOSEN = ["hydra.run.dir=run", "checkpoint.every=3", "eval_every=3", "log_every=1", "steps=9"]

SEEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit": (lambda c: flip(c / "training.safetensors"), f"training.safetensors {CHECKSUM}"),
    "half-renamed": (lambda c: c.rename(c.with_name(".step-00000006.tmp-1")), ""),
    "pickle": (lambda c: (c / "state.json").write_bytes(pickle.dumps([1] * 999)), "state.json has"),
    "other-version": (
        lambda c: without(c, "parts", "guard"),
        "the checkpoint has no state of 'guard': another version of stabletrain wrote it",
    ),
    "other-form": (lambda c: without(c, "skipped"), "its state has another form (KeyError('skipped'))"),
}


def without(checkpoint: Path, *place: str) -> None:
    """Makes the checkpoint one of another version, which did not save what lies at a place of its state."""
    skeleton = json.loads((checkpoint / "state.json").read_text())
    *above, name = "training", *place
    del functools.reduce(dict.__getitem__, above, skeleton)[name]
    forge(checkpoint, {"state.json": json.dumps(skeleton).encode()})


@pytest.mark.slow
@pytest.mark.parametrize("damage", SEEN)
def test_resume_goes_on_from_the_one_before_and_says_so(tmp_path, trained, damage):
    shutil.copytree(trained, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    harm, says = SEEN[damage]
    harm(newest)
    done = command(*TINY_GPT, *CHOSEN, "resume=auto", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "checkpoint" in line]
    if says:
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("stabletrain: checkpoint skipped: ")
        assert says in lines[0]
    else:
        assert not lines
    assert "resumed after step 3, from" in done.stdout
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line] == list(
        range(1, 10)
    )
    skips = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event["event"] == "checkpoint_skipped"]
    assert [event["step"] for event in skips] == ([6] if says else [])
    assert reader.verify(newest).healthy
    assert reader.verify(newest.with_name("step-00000009")).step == 9
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_another_models_checkpoint_in_the_folder_is_passed_over(tmp_path, trained):
    shutil.copytree(trained, tmp_path / "run")
    other, newest = Run(tmp_path / "other", run="theirs00"), tmp_path / "run" / "checkpoints" / "step-00000006"
    other.save(6)
    shutil.rmtree(newest)
    shutil.copytree(other.path(6), newest)
    done = command(*TINY_GPT, *CHOSEN, "resume=auto", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint skipped: {newest}: it belongs to run theirs00, but this is run " in done.stderr
    assert "resumed after step 3, from" in done.stdout


@pytest.mark.slow
def test_a_run_none_of_whose_states_can_be_restored_does_not_begin_anew(tmp_path, trained):
    shutil.copytree(trained, tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        without(checkpoint, "parts", "guard")
    done = command(*TINY_GPT, *CHOSEN, "resume=auto", cwd=tmp_path)
    assert done.returncode == 2
    assert "stabletrain: no checkpoint of this run can be restored (" in done.stderr
    assert "Traceback" not in done.stderr
    before = [line["step"] for line in read_jsonl(trained / "metrics.jsonl")]
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == before


def test_a_damaged_checkpoint_that_was_asked_for_is_refused_in_one_line(tmp_path, trained):
    shutil.copytree(trained, tmp_path / "run")
    flip(tmp_path / "run" / "checkpoints" / "step-00000006" / "model.safetensors")
    done = command(*TINY_GPT, "steps=9", "hydra.run.dir=new", "resume=run/checkpoints/step-00000006", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"stabletrain: run/checkpoints/step-00000006: model.safetensors {CHECKSUM}\n"


def test_where_none_is_left_the_run_starts_again_and_says_so(tmp_path, trained):
    shutil.copytree(trained, tmp_path / "run")
    left = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    for path in left:
        flip(path / "model.safetensors")
    done = command(*TINY_GPT, *CHOSEN, "resume=auto", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("checkpoint skipped: ") == len(left)
    assert "no usable checkpoint is left here; the run starts again from step 0" in done.stdout
