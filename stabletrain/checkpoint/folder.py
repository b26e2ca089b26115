"""The folder of checkpoints: which of them to continue from, and which to keep.

Notice of what happens to checkpoints: an event for the record, a line for people.

Retention: which checkpoints stay when another one has been written.

| stays | since |
|---|---|
| the `keep` newest | the run continues from one of them |
| the two newest healthy ones; the newest alone, where `keep` is 1 | a rollback and a resume fall back to them |
| the newest at or before the anchor | from it the state that a rollback asks for can be computed again |
| the best, if it is asked for | it is the result |

Why two: that a healthy checkpoint is still what was written shows only when all of it is read, which at each save would
take as long as the write. So one stands in for the other, and nothing is read. One that was found damaged counts for
nothing here (`folder.py` leaves it out). `keep: 1` asks for a single copy, and then there is no second.

The checkpoints in a folder, and which of them to continue from: the newest that can be trusted, or a healthy one.

Reading them needs no run. One that is damaged, or of another run, is passed over, and a line says which and why.
"""

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from stabletrain.checkpoint.reader import MANIFEST, Checkpoint, UnusableCheckpoint, peek, verify
from stabletrain.errors import ConfigError

OnEvent = Callable[[str, int, dict], None]
"""Takes an event's kind, its step and its fields; called from the writing thread too."""

ShowLine = Callable[[str], None]
"""Shows a person a line."""


def silent(kind: str, step: int, fields: dict) -> None:
    """A `Report` where there is no record."""
    del kind, step, fields


def warn(message: str) -> None:
    """One line for people, if there is still anybody to read it."""
    with suppress(OSError):
        print(f"stabletrain: {message}", file=sys.stderr)


def reason_of(error: OSError) -> str:
    """What the system says, and about which file: `No space left on device: /runs/a/checkpoints`."""
    return ": ".join(str(part) for part in (error.strerror or error, error.filename) if part)


def kept(known: Sequence[Checkpoint], keep: int, keep_best: bool, anchor: int | None = None) -> set[Path]:
    """The folders of those that stay.

    Args:
        known: all that look whole, oldest first.
        keep: so many of the newest stay.
        keep_best: the best stays too.
        anchor: so does the newest of a step up to this one; None for no such wish.
    """
    healthy = [checkpoint for checkpoint in known if checkpoint.healthy]
    best = by_val_loss(known)[:1] if keep_best else []
    early = [checkpoint for checkpoint in known if anchor is not None and checkpoint.step <= anchor][-1:]
    return {checkpoint.path for checkpoint in (*known[-keep:], *healthy[-min(keep, 2) :], *early, *best)}


def superseded(known: Sequence[Checkpoint], step: int, healthy: bool) -> set[Path]:
    """The folders of those after `step`, which a run that is at `step` again has left behind.

    Args:
        known: all that look whole, oldest first.
        step: where the run is.
        healthy: whether it has a healthy checkpoint at or before `step`; otherwise the newest healthy one stays, for
            it is the last.
    """
    after = [checkpoint for checkpoint in known if checkpoint.step > step]
    spared = [] if healthy else [checkpoint for checkpoint in after if checkpoint.healthy][-1:]
    return {checkpoint.path for checkpoint in after} - {checkpoint.path for checkpoint in spared}


def by_val_loss(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The healthy ones with a finite validation loss, best first, of equals the newest."""
    ranked = [c for c in checkpoints if c.healthy and c.val_loss is not None and math.isfinite(c.val_loss)]
    return sorted(ranked, key=lambda c: (c.val_loss, -c.step))


Verify = Callable[[Path], Checkpoint]
"""Reads a checkpoint through; raises UnusableCheckpoint, as `trust.verify` does."""

Marks = list[tuple[str, int, int, int, int]]
"""Of each file name, inode, size, and when it was written to and changed, in nanoseconds."""

NAME = re.compile(r"step-([0-9]{8,})")


class Folder:
    """The checkpoints in one folder.

    Args:
        path: the folder; it need not exist.
        report: is told `checkpoint_skipped`.
        run: id of the run that they must be of, where their `info` names one; None takes any.
        tell: shows a person a line.
        verify: reads a checkpoint through.

    Attributes:
        damaged: why those could not be used that were found so, until they can be.
    """

    def __init__(
        self,
        path: Path,
        report: OnEvent = silent,
        run: str | None = None,
        tell: ShowLine = warn,
        verify: Verify = verify,
    ) -> None:
        self.path, self.run = path, run
        self.damaged: dict[Path, str] = {}
        self._good: dict[Path, Marks] = {}
        self._report, self._tell, self._verify = report, tell, verify

    def mark_verified(self, path: Path) -> None:
        """Remembers that a checkpoint which this process has just written is what was written."""
        if (marks := marks_of(path)) is not None:
            self._good[path] = marks

    def newest(
        self, *, healthy_only: bool = False, at_most: int | None = None, again: bool = True
    ) -> Checkpoint | None:
        """The newest checkpoint that verifies; those that do not are reported with their reason and passed over.

        Args:
            healthy_only: pass over those that are not healthy, in silence.
            at_most: pass over those of later steps, in silence.
            again: read through also what this process has written or read through before, and nobody has touched since.
        """
        for path in reversed(self._paths()):
            if at_most is not None and number(path) > at_most:
                continue
            found = self._verified(path, healthy_only, again)
            if found is not None:
                return found
        return None

    def oldest(self) -> Checkpoint | None:
        """The oldest healthy checkpoint that verifies."""
        return next((found for path in self._paths() if (found := self._verified(path, True)) is not None), None)

    def best(self) -> Checkpoint | None:
        """The healthy checkpoint of the lowest validation loss that verifies."""
        return next((c for c in by_val_loss(self.known()) if self._verified(c.path, True) is not None), None)

    def preferred(self) -> Checkpoint | None:
        """What to continue from: the newest that verifies, if it is healthy; else the newest healthy one; else, where
        no healthy one is left, the newest after all. A line says where it is not simply the newest and healthy.
        """
        newest = self.newest()
        if newest is None or newest.healthy:
            return newest
        healthy = self.newest(healthy_only=True, at_most=newest.step - 1)
        if healthy is None:
            self._tell(f"{newest.path} is not healthy, and no healthy one is left: continuing from it all the same")
            return newest
        self._tell(f"checkpoint skipped: {newest.path} is not healthy: continuing from {healthy.path.name}, which is")
        self._report("checkpoint_skipped", newest.step, {"path": newest.path.name, "reason": "not healthy"})
        return healthy

    def known(self) -> list[Checkpoint]:
        """All that look whole and were not found damaged, oldest first. The others are left for people to look at."""
        known = []
        for path in self._paths():
            try:
                known.append(self._own(peek(path)))
            except UnusableCheckpoint:
                continue
        return [checkpoint for checkpoint in known if checkpoint.path not in self.damaged]

    def _paths(self) -> list[Path]:
        try:
            return list(steps_in(self.path))
        except UnusableCheckpoint as error:
            self._pass_over(self.path, 0, str(error))
            return []

    def _verified(self, path: Path, healthy_only: bool, again: bool = True) -> Checkpoint | None:
        try:
            found = self._own(peek(path))
            if healthy_only and not found.healthy:
                return None
            marks = marks_of(path)
            if again or marks is None or self._good.get(path) != marks:
                found = self._verify(path)
            if marks is not None:
                self._good[path] = marks
        except UnusableCheckpoint as error:
            self._good.pop(path, None)
            self._pass_over(path, number(path), str(error))
            return None
        self.damaged.pop(path, None)
        return found

    def _own(self, found: Checkpoint) -> Checkpoint:
        """The checkpoint itself, if it is of this name and this run."""
        if found.step != number(found.path):
            raise UnusableCheckpoint(f"{found.path}: its manifest is of step {found.step}")
        run = found.info.get("run")
        if None not in (run, self.run) and run != self.run:
            raise UnusableCheckpoint(f"{found.path}: it is of run {run}, and this is run {self.run}")
        return found

    def _pass_over(self, path: Path, step: int, reason: str) -> None:
        if self.damaged.get(path) != reason:  # said once
            self.damaged[path] = reason
            self._tell(f"checkpoint skipped: {reason}")
            self._report("checkpoint_skipped", step, {"path": path.name, "reason": reason})


def find(path: Path, *, best: bool = False, verify: Verify = verify) -> Checkpoint:
    """A checkpoint to read from, without a run.

    Args:
        path: a checkpoint, which is taken as it is asked for; or a folder of checkpoints or a run folder, of which
            the one is taken that a run would continue from.
        best: of a folder, the healthy one of the lowest validation loss instead.
        verify: reads a checkpoint through.

    Raises:
        ConfigError: there is none; names the folder and what is wrong with those that are there.
    """
    if NAME.fullmatch(path.name) or os.path.exists(path / MANIFEST):
        return verify(path)
    lines: list[str] = []
    folder = Folder(inside(path), tell=lines.append, verify=verify)
    found = folder.best() if best else folder.preferred()
    if found is not None:
        for line in lines:
            warn(line)
        return found
    kind = "checkpoint with a validation loss" if best else "checkpoint"
    why = "; ".join(folder.damaged.values()) or "name a run folder, its checkpoints folder, or one step-XXXXXXXX in it"
    raise ConfigError(f"{path} holds no usable {kind}: {why}")


def run_of(path: Path) -> str | None:
    """The id of the run whose checkpoints are in a run folder, as the newest that looks whole has it; None where
    nobody says."""
    ids = [checkpoint.info.get("run") for checkpoint in Folder(inside(path)).known()]
    return next((run for run in reversed(ids) if run), None)


def marks_of(path: Path) -> Marks | None:
    """What changes when a file of a checkpoint is written to or replaced; None where the folder cannot be read."""
    try:
        stats = [(file, file.stat()) for file in sorted(path.rglob("*"))]
    except OSError:
        return None
    return [(str(file), each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for file, each in stats]


def inside(path: Path) -> Path:
    """The folder of checkpoints of a run folder; any other folder itself."""
    return path / "checkpoints" if os.path.isdir(path / "checkpoints") else path


def steps_in(folder: Path) -> Iterator[Path]:
    """The paths that are named like checkpoints, oldest first.

    Raises:
        UnusableCheckpoint: the folder is there and cannot be read.
    """
    try:
        named = [folder / name for name in os.listdir(folder) if NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UnusableCheckpoint(f"{folder} cannot be read ({error.strerror or error})") from error
    yield from sorted(named, key=number)


def number(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.partition("-")[2])
