"""A checkpoint folder under any history: saves, damage, failing calls, kills, rollbacks and restarts, in any order.

The model is a dict of what has to be on the disk. After every action the folder has to hold exactly that, and whatever
is read has to be what was saved, to the bit, or to be refused.
"""

import errno
import itertools
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stabletrain.checkpoint import writer
from stabletrain.checkpoint.checkpoints import Checkpoints, write_shard
from stabletrain.checkpoint.folder import find
from stabletrain.checkpoint.reader import Checkpoint, UnusableCheckpoint, peek, verify
from stabletrain.checkpoint.sharded import RankShard
from stabletrain.checkpoint.tree import ShardWriters, Tree, flatten
from stabletrain.errors import ConfigError
from tests.checkpoint.given import FILES, as_rank, flip, rewrite_manifest

# ---- states

FLAWS = {
    "": "",
    "a negative momentum": "",
    "a weight that is NaN": "w is not finite",
    "a weight that is inf": "w is not finite",
    "a moment that is -inf": "optimizer/w/exp_avg is not finite",
    "a negative second moment": "optimizer/w/exp_avg_sq is negative",
}
"""What is wrong with a state, and why its checkpoint is not healthy."""


def state(value: int, flaw: str, shard: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Tree:
    """A state that differs from that of any other value."""
    weight, mean, square = (torch.tensor([value + 0.1, -0.0, each, 1 / 3]) for each in (5e-39, 2.0, 3.0))
    bad = {"a weight that is NaN": (weight, math.nan), "a weight that is inf": (weight, math.inf)}
    bad |= {"a moment that is -inf": (mean, -math.inf), "a negative second moment": (square, -1e-30)}
    bad |= {"a negative momentum": (mean, -1.0)}
    if flaw:
        tensor, number = bad[flaw]
        tensor[3] = number
    return {
        "model": {"w": shard(weight), "half": torch.tensor([value % 200]).bfloat16()},
        "optimizer": {"state": {"w": {"exp_avg": shard(mean), "exp_avg_sq": shard(square)}}},
        "parts": {"guard": {"limit": value / 3, "window": [math.nan, -0.0, value]}},
        "step": value,
    }


def bits(tree: Tree) -> Any:
    """Everything in a tree, to compare."""
    tensors, skeleton = flatten(tree)
    return repr(skeleton), {
        name: (each.dtype, each.shape, each.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, each in tensors.items()
    }


@dataclass(frozen=True)
class Saved:
    """What has to be on the disk for one step.

    Attributes:
        value, flaw: of the state.
        harmed: the file that was damaged, or the folder's name; empty if it is intact.
        seen: whether the damage shows without reading the tensors.
        foreign: whether only this run refuses it: it belongs to another run or another step.
    """

    value: int
    flaw: str
    healthy: bool
    val_loss: float | None
    harmed: str = ""
    seen: bool = False
    foreign: bool = False


Disk = dict[int, Saved]

# ---- failures


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def failing(at: int, number: int = 0, times: int = 1) -> Iterator[None]:
    """Makes the `at`-th of the calls that write fail with an error number, and the next ones up to `times`.

    Without a number the process is killed before that call: this one is done by half, and none after it is done at all.
    """
    calls = itertools.count(1)

    def refuse(half: Callable[[], Any] = list) -> None:
        call = next(calls)
        if call < at or (number and call >= at + times):
            return
        if number or call == at:
            half()
        raise OSError(number, os.strerror(number)) if number else Killed

    def guarded(function: Callable, half: Callable = lambda *_: None) -> Callable:
        def called(*given: Any, **options: Any) -> Any:
            refuse(lambda: half(*given))
            return function(*given, **options)

        return called

    def half_deleted(path: Path) -> None:
        for file in sorted(each for each in Path(path).rglob("*") if each.is_file())[::2]:
            os.unlink(file)

    class Opened:
        """A file whose writes can fail by half."""

        def __init__(self, path: Path, mode: str) -> None:
            refuse()
            self.file = open(path, mode)  # noqa: SIM115

        def __enter__(self) -> "Opened":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, piece: bytes) -> None:
            refuse(lambda: self.file.write(piece[: len(piece) // 2]))
            self.file.write(piece)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", guarded(lambda _: None))
        patch.setattr(Path, "mkdir", guarded(Path.mkdir))
        patch.setattr(Path, "rename", guarded(Path.rename))
        patch.setattr(writer, "open", Opened, raising=False)
        if not number:  # a full or broken disk still deletes
            patch.setattr(Path, "unlink", guarded(Path.unlink))
            patch.setattr(shutil, "rmtree", guarded(shutil.rmtree, half_deleted))
        yield


def cut(path: Path, where: int) -> None:
    os.truncate(path, where % path.stat().st_size)


def longer(path: Path, where: int) -> None:
    path.write_bytes(path.read_bytes() + bytes(1 + where % 9))


def flipped(path: Path, where: int) -> None:
    marks = path.stat()
    flip(path, where // 8 % marks.st_size, where % 8)
    os.utime(path, ns=(marks.st_atime_ns, marks.st_mtime_ns + 1))  # the clock of a file system may stand still


def replaced(make: Callable[[Path], Any]) -> Callable[[Path, int], None]:
    def harm(path: Path, where: int) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return harm


FILE_HARMS: dict[str, Callable[[Path, int], None]] = {
    "a flipped bit": flipped,
    "cut": cut,
    "longer": longer,
    "missing": replaced(lambda path: None),
    "a pipe": replaced(os.mkfifo),
    "a folder": replaced(Path.mkdir),
    "a link to itself": replaced(lambda path: path.symlink_to(path)),
    "of other content": replaced(lambda path: path.write_bytes(b"[" * 10_000)),
}
FOLDER_HARMS: dict[str, Callable[[Path, int], None]] = {
    "a file": replaced(Path.touch),
    "empty": replaced(Path.mkdir),
    "a link to itself": replaced(lambda path: path.symlink_to(path)),
    "a link to nothing": replaced(lambda path: path.symlink_to("nothing")),
    "another format's": lambda path, _: rewrite_manifest(path, format=99),
    "another step's": lambda path, where: rewrite_manifest(path, step=10_000 + where),
    "another run's": lambda path, _: rewrite_manifest(path, info={"run": "theirs00"}),
}
FOREIGN = ("another step's", "another run's")


def stands(path: Path) -> bool:
    """Whether a checkpoint shows no damage."""
    try:
        peek(path)
    except UnusableCheckpoint:
        return False
    return True


# ---- the folder and its model

NUMBERS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]
LOSSES = st.sampled_from([None, math.nan, math.inf, -math.inf, 1.0, 2.0, 3.0])
CALLS = st.integers(1, 30)
"""A replacement that deletes two checkpoints makes fewer."""

STATES = st.fixed_dictionaries(
    {
        "ahead": st.sampled_from([0, 1, 1, 2, 3]),
        "believed": st.booleans(),
        "flaw": st.sampled_from(["", "", "", "", *FLAWS]),
        "val_loss": LOSSES,
        "anchors": st.just([]) | st.lists(st.integers(0, 12), max_size=2),
    }
)
"""What is saved: how many steps after the last one, and what is known of it."""


class History(RuleBasedStateMachine):
    """Actions on one checkpoint folder."""

    ranks = 1
    asynchronous = False

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.root, self.folder = Path(self.temporary.name), Path(self.temporary.name, "checkpoints")
        self.disk: Disk = {}
        self.values = itertools.count(1)

    @initialize(keep=st.integers(1, 3), keep_best=st.booleans(), first=st.lists(STATES, max_size=5))
    def first_start(self, keep: int, keep_best: bool, first: list[dict]) -> None:
        self.keep, self.keep_best = keep, keep_best
        self.start()
        self.resume()
        for what in first:
            self.save(what, 0)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            for step in self.disk:
                self.check(step)
        self.temporary.cleanup()

    # ---- what this process does

    def start(self) -> None:
        """Starts a process: it knows nothing about the checkpoints."""
        self.left_out: set[int] = set()  # steps whose damage this process has found, or whose state it rejected
        self.told: dict[int, str] = {}  # why it skipped checkpoints
        self.events: list[tuple[str, int, dict]] = []
        self.checkpoints = Checkpoints(1, self.keep, self.keep_best, self.asynchronous)
        self.checkpoints.open(self.root, lambda *event: self.events.append(event), "ours0000")

    def resume(self) -> None:
        """Continues from the preferred checkpoint."""
        found = self.checkpoints.preferred()
        self.expect(found, expected := self.preferred())
        self.at = 0 if expected is None else expected

    def write(self, step: int, saved: Saved, believed: bool, anchors: list[int], here: bool) -> None:
        """Saves a state and waits."""
        options = {"info": {"run": "ours0000", "value": saved.value, "seen": math.inf}, "healthy": believed}
        options |= {"val_loss": saved.val_loss, "anchors": anchors, "here": here}
        if self.ranks == 1:
            self.checkpoints.save(step, state(saved.value, saved.flaw), **options)
        else:
            temporary, others = writer.hidden(self.folder, step, f"-{self.checkpoints._begun + 1}"), []
            for rank in range(1, self.ranks):
                with as_rank(rank, self.ranks) as shard:
                    writers = ShardWriters(rank, self.ranks, math.inf, lambda question: question())
                    tree = state(saved.value, saved.flaw, shard)
                    others.append(RankShard(temporary, writers, tree, Event(), writer.write_file))

            def begin(question: Callable[[], Any]) -> Any:
                begun = question()
                for other in others if begun is not None else ():
                    write_shard(other, believed)
                return begun

            with as_rank(0, self.ranks) as shard:
                tree = state(saved.value, saved.flaw, shard)
                self.checkpoints.save(step, tree, writers=ShardWriters(0, self.ranks, math.inf, begin), **options)
        self.checkpoints.wait()

    # ---- what has to be on the disk

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def listed(self, disk: Disk) -> list[int]:
        """The steps that this process believes to be intact."""
        return [step for step in sorted(disk) if not disk[step].seen and step not in self.left_out]

    def after(self, step: int, saved: Saved, anchors: Iterable[int], here: bool) -> Disk:
        """What is left after a save."""
        self.left_out.discard(step)
        disk = {**self.disk, step: saved}
        if here:
            self.go_back(disk, step, saved.healthy)
        known = self.listed(disk)
        healthy = [each for each in known if disk[each].healthy]
        ranked = [(disk[each].val_loss, -each) for each in healthy if math.isfinite(disk[each].val_loss or math.nan)]
        stays = {*known[-self.keep :], *healthy[-min(self.keep, 2) :]} | ({step} if here else set())
        stays |= {-min(ranked)[1]} if ranked and self.keep_best else set()
        for anchor in anchors:  # the newest at or before it, if there is one
            stays |= {*[each for each in known if each <= anchor][-1:]}
        return {each: content for each, content in disk.items() if each not in known or each in stays}

    def go_back(self, disk: Disk, step: int, healthy: bool) -> None:
        """Deletes the checkpoints after a step; the newest healthy one is spared if there is none at or before it."""
        later = [each for each in self.listed(disk) if each > step]
        spared = [] if healthy else [each for each in later if disk[each].healthy][-1:]
        for each in {*later} - {*spared}:
            del disk[each]

    def first(self, steps: Iterable[int], left_out: set[int], healthy_only: bool = False) -> int | None:
        """The first of the steps that is intact; all before it are left out from now on."""
        for step in steps:
            if not self.disk[step].seen and healthy_only and not self.disk[step].healthy:
                continue
            if not self.disk[step].harmed and step not in left_out:
                return step
            left_out.add(step)
        return None

    def newest(
        self, healthy_only: bool = False, at_most: float = math.inf, left_out: set[int] | None = None
    ) -> int | None:
        steps = [step for step in sorted(self.disk, reverse=True) if step <= at_most]
        return self.first(steps, self.left_out if left_out is None else left_out, healthy_only)

    def preferred(self, left_out: set[int] | None = None) -> int | None:
        newest = self.newest(left_out=left_out)
        if newest is None or self.disk[newest].healthy:
            return newest
        healthy = self.newest(True, newest, left_out)
        return newest if healthy is None else healthy

    def best(self, left_out: set[int]) -> int | None:
        found = {each: self.disk[each] for each in self.disk if self.disk[each].healthy and not self.disk[each].seen}
        ranked = [(each.val_loss, -step) for step, each in found.items() if math.isfinite(each.val_loss or math.nan)]
        return self.first((-step for _, step in sorted(ranked) if -step not in left_out), left_out)

    def newest_healthy(self) -> int | None:
        """The newest healthy intact checkpoint, of which this process need not know that it is the newest."""
        return self.newest(True, left_out={*self.left_out})

    def unnoticed(self) -> int:
        """How many healthy checkpoints are damaged without this process knowing."""
        return sum(
            bool(each.harmed) and not each.seen and each.healthy and step not in self.left_out
            for step, each in self.disk.items()
        )

    # ---- what is checked

    def expect(self, found: Checkpoint | None, step: int | None) -> None:
        """Checks that the right checkpoint was found, and that it holds what was saved."""
        assert (None if found is None else found.step) == step
        if found is not None and step is not None:
            self.holds(found, self.disk[step])
        self.check_events()
        assert {each for each in self.left_out if each in self.disk} <= {*self.told}, "what is skipped is reported"

    def holds(self, found: Checkpoint, saved: Saved) -> None:
        told = found.healthy, repr(found.val_loss), found.info["value"], found.info["seen"]
        assert told == (saved.healthy, repr(saved.val_loss), saved.value, math.inf)
        wanted = state(saved.value, saved.flaw)
        assert bits(found.load()) == bits(wanted)
        assert bits(found.load_model()) == bits(wanted["model"])

    def check(self, step: int) -> None:
        """Checks that a checkpoint holds what was saved, or is refused."""
        saved, path = self.disk[step], self.path(step)
        if not saved.harmed:
            self.holds(verify(path), saved)
        elif not saved.foreign:
            for read in (verify, find, Checkpoint(path, step, True, None, {}).load):
                with pytest.raises(UnusableCheckpoint) as refused:
                    read(path) if read in (verify, find) else read()
                assert str(refused.value).startswith(str(path))
                assert saved.harmed in str(refused.value)
            if saved.seen:
                with pytest.raises(UnusableCheckpoint):
                    peek(path)

    def check_events(self) -> list[tuple[str, int, dict]]:
        """Checks each skip that was reported: it is true, names the file, and is new. Returns the other events."""
        events, self.events[:] = [*self.events], []
        for kind, step, fields in events:
            if kind != "checkpoint_skipped":
                continue
            assert fields["path"] == f"step-{step:08d}"
            if fields["reason"] == "not healthy":
                assert not self.disk[step].healthy
                continue
            assert step in self.left_out
            assert self.disk[step].harmed in fields["reason"]
            assert self.told.get(step) != fields["reason"], "reported once"
            self.told[step] = fields["reason"]
        return [event for event in events if event[0] != "checkpoint_skipped"]

    @invariant()
    def the_folder_holds_what_the_model_says(self) -> None:
        assert self.names() == [self.path(step).name for step in sorted(self.disk)]

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if self.folder.is_dir() else []

    def steps(self) -> set[int]:
        return {int(name[5:]) for name in self.names() if name.startswith("step-")}

    # ---- actions

    def prepared(self, what: dict, older: int = 0) -> tuple[int, Saved, bool, list[int]]:
        """Where a state is saved, and what is known of it."""
        step = self.at + what["ahead"] - older
        healthy = what["believed"] and not FLAWS[what["flaw"]]
        saved = Saved(next(self.values), what["flaw"], healthy, what["val_loss"])
        return step, saved, what["believed"], what["anchors"]

    def saved(self, step: int, saved: Saved, believed: bool) -> None:
        """Checks the event of a save that succeeded."""
        [(kind, at, fields)] = self.check_events()
        assert (kind, at, fields["path"]) == ("checkpoint", step, self.path(step).name)
        assert fields["healthy"] == saved.healthy
        assert fields.get("reason", "") == (FLAWS[saved.flaw] if believed else "")
        self.told.pop(step, None)
        assert self.checkpoints.unsaved() is None

    @rule(what=STATES, older=st.sampled_from([0, 0, 0, 0, 1, 4]))
    def save(self, what: dict, older: int) -> None:
        step, saved, believed, anchors = self.prepared(what, older)
        if step < 0:
            return
        here, lost, unnoticed = step >= self.at, self.newest_healthy(), self.unnoticed()
        self.write(step, saved, believed, anchors, here)
        self.disk = self.after(step, saved, anchors, here)
        self.saved(step, saved, believed)
        for each in {step} & {*self.disk}:  # an older state may be deleted at once
            self.check(each)
        self.at = max(step, self.at)
        if lost not in (None, step) and unnoticed < min(self.keep, 2):
            assert self.newest_healthy() is not None, "the last healthy state is never lost"

    @rule(what=STATES, at=CALLS, number=st.sampled_from(NUMBERS), times=st.sampled_from([1, 1, 1 << 30]))
    def save_while_calls_fail(self, what: dict, at: int, number: int, times: int) -> None:
        step, saved, believed, anchors = self.prepared(what)
        before, left_out, failed = {**self.disk}, {*self.left_out}, self.checkpoints.failed
        with failing(at, number, times):
            self.write(step, saved, believed, anchors, True)
        if self.checkpoints.failed > failed:
            assert self.checkpoints.failed == failed + 1
            assert os.strerror(number) in self.checkpoints.unsaved()
            assert [kind for kind, _, _ in self.check_events()] in ([], ["checkpoint_failed"])
            if times > 1:  # a checkpoint that was set aside comes back at the next start
                self.start()
                self.resume()
            assert (self.disk, self.left_out) == (before, left_out) or times > 1
        else:
            after = self.after(step, saved, anchors, True)
            here = self.steps()
            assert {*after} <= here <= {*before, step}
            assert len(here - {*after}) <= times, "what could not be deleted is still there"
            self.disk = {each: after.get(each) or before[each] for each in here}
            self.saved(step, saved, believed)
            self.at = step
        for each in self.disk:
            self.check(each)

    @rule(what=STATES, at=CALLS, again=st.none() | st.integers(1, 6), empty=st.booleans())
    def save_and_be_killed(self, what: dict, at: int, again: int | None, empty: bool) -> None:
        step, saved, believed, anchors = self.prepared(what)
        before = {**self.disk}
        try:
            with failing(at):
                self.write(step, saved, believed, anchors, True)
            killed = False
        except Killed:
            killed = True
        after = self.after(step, saved, anchors, True)
        old = self.folder / f".{self.path(step).name}.old-{os.getpid()}"
        if killed and empty and stands(old) and step in self.steps():
            replaced(Path.mkdir)(self.path(step), 0)  # the one that was set aside comes back
        if killed and again:  # also while it tidies up
            with failing(again), suppress(Killed):
                self.start()
        self.start()
        here, path = self.steps(), self.path(step)
        new = stands(path) and peek(path).info.get("value") == saved.value
        assert new or killed
        assert ({*after} <= here <= {*before, step}) if new else here == {*before}
        self.disk = {each: after.get(each) or before[each] for each in here} if new else before
        for each in self.disk:
            self.check(each)
        self.resume()

    @precondition(lambda self: self.intact())
    @rule(
        which=st.integers(0, 9),
        name=st.sampled_from(FILES),
        kind=st.sampled_from([*FILE_HARMS]),
        where=st.integers(0, 1 << 16),
        look=st.booleans(),
    )
    def damage_a_file(self, which: int, name: str, kind: str, where: int, look: bool) -> None:
        step = self.intact()[which % len(self.intact())]
        name = self.file(step, name)
        FILE_HARMS[kind](self.path(step) / name, where)
        seen = kind != "a flipped bit" or name == "manifest.json"
        self.disk[step] = replace(self.disk[step], harmed=name, seen=seen)
        self.check(step)
        if look:
            self.read(step, False)

    @precondition(lambda self: self.intact())
    @rule(which=st.integers(0, 9), kind=st.sampled_from([*FOLDER_HARMS]), where=st.integers(0, 9))
    def damage_a_folder(self, which: int, kind: str, where: int) -> None:
        step = self.intact()[which % len(self.intact())]
        FOLDER_HARMS[kind](self.path(step), where)
        self.disk[step] = replace(self.disk[step], harmed=self.path(step).name, seen=True, foreign=kind in FOREIGN)
        self.check(step)
        self.read(step, False)

    def intact(self) -> list[int]:
        return [step for step in sorted(self.disk) if not self.disk[step].harmed]

    def file(self, step: int, name: str) -> str:
        """The name of a file of a checkpoint that one or several ranks wrote."""
        if (self.path(step) / name).exists():
            return name
        return f"{name.partition('.')[0]}/shard-00001-model-00001-of-00001.safetensors"

    @rule()
    def delete_everything(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.disk = {}
        self.expect(self.checkpoints.newest(), None)

    @rule(step=st.integers(0, 12), healthy_only=st.booleans())
    def read(self, step: int, healthy_only: bool) -> None:
        kept = self.checkpoints
        self.expect(kept.newest(healthy_only=healthy_only, at_most=step), self.newest(healthy_only, step))
        self.expect(kept.newest(healthy_only=healthy_only), self.newest(healthy_only))
        self.expect(kept.best(), self.best(self.left_out))
        self.expect(kept.oldest(), self.first(sorted(self.disk), self.left_out, True))
        self.expect(kept.preferred(), self.preferred())
        assert kept.reaches(step) == any(each <= step for each in self.listed(self.disk))

    @precondition(lambda self: not any(each.foreign for each in self.disk.values()))
    @rule(best=st.booleans(), folder=st.booleans())
    def read_without_a_run(self, best: bool, folder: bool) -> None:
        step = self.best(set()) if best else self.preferred(set())
        try:
            found = find(self.folder if folder else self.root, best=best)
        except ConfigError:
            found = None
        assert (found and found.step) == step
        if found and step is not None:
            self.holds(found, self.disk[step])

    @rule(back=st.integers(0, 4))
    def roll_back(self, back: int) -> None:
        step, healthy = max(self.at - back, 0), self.newest_healthy()
        self.checkpoints.rewind(step)
        before = self.newest(True, step)
        if before is None:
            self.newest(True)
        self.go_back(self.disk, step, before is not None)
        self.check_events()
        self.at = step
        assert healthy is None or self.newest_healthy() is not None, "the last healthy state is never lost"

    @precondition(lambda self: self.newest(left_out={*self.left_out}) is not None)
    @rule()
    def reject(self) -> None:
        step, found = self.newest(), self.checkpoints.newest()
        self.expect(found, step)
        assert self.checkpoints.accept(found, "")
        assert not self.checkpoints.accept(found, "it has no state of 'guard'")
        self.left_out.add(step)
        self.expect(self.checkpoints.preferred(), self.preferred())

    @rule(at=st.none() | st.integers(1, 6), number=st.sampled_from([*NUMBERS, 0]))
    def start_again(self, at: int | None, number: int) -> None:
        refused = ""
        try:
            with failing(at or 1 << 30, number):
                self.start()
        except (ConfigError, Killed) as error:
            refused = str(error)
        assert not refused or f"no checkpoint can be written to {self.folder} ({os.strerror(number)})" in refused
        self.start()
        self.resume()


class Asynchronous(History):
    """A background thread writes."""

    asynchronous = True


class Sharded(History):
    """Two ranks write."""

    ranks = 2


FIXED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.generate, Phase.shrink],
    stateful_step_count=25,
)


@pytest.mark.parametrize(("kind", "histories"), [(History, 30), (Sharded, 5)], ids=["one process", "ranks"])
def test_any_history_leaves_what_it_has_to(kind, histories):
    run_state_machine_as_test(kind, settings=settings(FIXED, max_examples=histories))


LONGER = {"one process": (History, 100), "a background thread": (Asynchronous, 35), "ranks": (Sharded, 15)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "histories"), LONGER.values(), ids=LONGER)
def test_any_longer_history_leaves_what_it_has_to(kind, histories):
    run_state_machine_as_test(kind, settings=settings(FIXED, max_examples=histories, stateful_step_count=50))
