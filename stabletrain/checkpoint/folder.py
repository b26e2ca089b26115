"""Finds the checkpoint to continue from, and decides which checkpoints to keep.

A checkpoint that is damaged or belongs to another run is skipped, with one line that says which and why.

| kept after a write | because |
|---|---|
| the `keep` newest | the run continues from one of them |
| the two newest healthy ones; only the newest if `keep` is 1 | a rollback and a resume fall back to them |
| the newest at or before each retained state | a rollback can recompute that state from it |
| the best, if `keep_best` is set | it is the result |
| the one just written | it is reported as saved, also if a later healthy one was spared by a rollback |

The second healthy one is a reserve in case the first turns out to be damaged. Verifying the first at each save instead
would take as long as writing it. Checkpoints known to be damaged do not count.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stabletrain.checkpoint.reader import MANIFEST, Checkpoint, UnusableCheckpoint, peek, verify
from stabletrain.errors import ConfigError
from stabletrain.printable import warn

OnEvent = Callable[[str, int, dict], None]
"""Receives an event's kind, its step and its fields. Also called from the writing thread."""

ShowLine = Callable[[str], None]
"""Shows the user one line."""


def silent(kind: str, step: int, fields: dict) -> None:
    """Ignores the event: an `OnEvent` for reading without a run."""


def reason_of(error: OSError) -> str:
    """Returns the system's error text and the file: `No space left on device: /runs/a/checkpoints`."""
    return ": ".join(str(part) for part in (error.strerror or error, error.filename) if part)


def kept(known: Sequence[Checkpoint], keep: int, keep_best: bool, anchors: Sequence[int] = ()) -> set[Path]:
    """Returns the folders of the checkpoints to keep, by the table above.

    Args:
        known: the checkpoints that pass `reader.peek`, oldest first.
        keep: number of newest checkpoints to keep.
        keep_best: whether to keep the best one too.
        anchors: steps of the retained states.
    """
    healthy = [checkpoint for checkpoint in known if checkpoint.healthy]
    best = by_val_loss(known)[:1] if keep_best else []
    stays = [*known[-keep:], *healthy[-min(keep, 2) :], *best]
    for step in anchors:
        stays += [checkpoint for checkpoint in known if checkpoint.step <= step][-1:]
    return {checkpoint.path for checkpoint in stays}


def superseded(known: Sequence[Checkpoint], step: int, healthy: bool) -> set[Path]:
    """Returns the folders of the checkpoints after `step`, obsolete since the run is at `step` again.

    Args:
        known: the checkpoints that pass `reader.peek`, oldest first.
        step: where the run is.
        healthy: whether a healthy checkpoint at or before `step` exists. If not, the newest healthy one is not
            returned.
    """
    after = [checkpoint for checkpoint in known if checkpoint.step > step]
    spared = [] if healthy else [checkpoint for checkpoint in after if checkpoint.healthy][-1:]
    return {checkpoint.path for checkpoint in after} - {checkpoint.path for checkpoint in spared}


def by_val_loss(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Returns the healthy checkpoints with a finite validation loss, best first; of equals, the newest first."""
    ranked = [c for c in checkpoints if c.healthy and c.val_loss is not None and math.isfinite(c.val_loss)]
    return sorted(ranked, key=lambda c: (c.val_loss, -c.step))


Verify = Callable[[Path], Checkpoint]
"""Reads a checkpoint in full; raises UnusableCheckpoint, as `reader.verify` does."""

Marks = list[tuple[str, int, int, int, int]]
"""For each file: name, inode, size, and the times of its last write and last change in nanoseconds."""

NAME = re.compile(r"step-([0-9]{8,})")


class Folder:
    """The checkpoints in one folder.

    Args:
        path: the folder; it need not exist.
        report: receives `checkpoint_skipped` events.
        run: id of the run that the checkpoints must belong to, if their `info` names one; None accepts any.
        tell: shows the user one line.
        verify: reads a checkpoint in full.

    Attributes:
        damaged: by path, why a checkpoint cannot be used.
        report: as given.
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
        self._rejected: dict[Path, str] = {}
        self.report, self._tell, self._verify = report, tell, verify

    def mark_verified(self, path: Path) -> None:
        """Records that a checkpoint this process has just written is intact."""
        self._rejected.pop(path, None)
        if (marks := marks_of(path)) is not None:
            self._good[path] = marks

    def reject(self, path: Path, reason: str) -> None:
        """Skips a checkpoint from now on: it verifies, but its state cannot be that of the run."""
        self._rejected[path] = reason
        self._pass_over(path, number(path), reason)

    def newest(
        self, *, healthy_only: bool = False, at_most: int | None = None, again: bool = True
    ) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies. Skips those that do not, and reports why.

        Args:
            healthy_only: silently skip checkpoints that are not healthy.
            at_most: silently skip checkpoints of later steps.
            again: also verify unchanged checkpoints that this process has already written or verified.
        """
        for path in reversed(self._paths()):
            if at_most is not None and number(path) > at_most:
                continue
            found = self._verified(path, healthy_only, again)
            if found is not None:
                return found
        return None

    def oldest(self) -> Checkpoint | None:
        """Returns the oldest healthy checkpoint that verifies."""
        return next((found for path in self._paths() if (found := self._verified(path, True)) is not None), None)

    def best(self) -> Checkpoint | None:
        """Returns the checkpoint with the lowest validation loss among the healthy ones that verify."""
        return next((c for c in by_val_loss(self.known()) if self._verified(c.path, True) is not None), None)

    def preferred(self) -> Checkpoint | None:
        """Returns the checkpoint to continue from: the newest that verifies if it is healthy, else the newest healthy.

        If no healthy one is left, returns the newest anyway. Tells the user if the newest is not healthy.
        """
        newest = self.newest()
        if newest is None or newest.healthy:
            return newest
        healthy = self.newest(healthy_only=True, at_most=newest.step - 1)
        if healthy is None:
            self._tell(f"{newest.path} is not healthy, and no healthy one is left: continuing from it anyway")
            return newest
        self._tell(f"checkpoint skipped: {newest.path} is not healthy: continuing from {healthy.path.name}, which is")
        self.report("checkpoint_skipped", newest.step, {"path": newest.path.name, "reason": "not healthy"})
        return healthy

    def known(self) -> list[Checkpoint]:
        """Returns the checkpoints that pass `reader.peek` and are not known to be damaged, oldest first."""
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
            if path in self._rejected:
                raise UnusableCheckpoint(self._rejected[path])
            found = self._own(peek(path))
            if healthy_only and not found.healthy:
                return None
            marks = marks_of(path)  # before reading, so that a change meanwhile is noticed next time
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
        """Returns `found` if its step matches its folder's name and it belongs to this run."""
        if found.step != number(found.path):
            raise UnusableCheckpoint(f"{found.path}: its manifest says step {found.step}")
        run = found.info.get("run")
        if None not in (run, self.run) and run != self.run:
            raise UnusableCheckpoint(f"{found.path}: it belongs to run {run}, but this is run {self.run}")
        return found

    def _pass_over(self, path: Path, step: int, reason: str) -> None:
        if self.damaged.get(path) != reason:  # report each reason once
            self.damaged[path] = reason
            self._tell(f"checkpoint skipped: {reason}")
            self.report("checkpoint_skipped", step, {"path": path.name, "reason": reason})


def find(path: Path, *, best: bool = False, verify: Verify = verify) -> Checkpoint:
    """Returns a checkpoint to read from, without a run.

    Args:
        path: a checkpoint; or a folder of checkpoints or a run folder, which stands for the one a run would continue
            from.
        best: in a folder of checkpoints, choose the healthy one with the lowest validation loss instead.
        verify: reads a checkpoint in full.

    Raises:
        ConfigError: there is none; names the folder and why its checkpoints cannot be used.
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
    """Returns the run id of the newest readable checkpoint that has one; None if none has."""
    ids = [checkpoint.info.get("run") for checkpoint in Folder(inside(path)).known()]
    return next((run for run in reversed(ids) if run), None)


def marks_of(path: Path) -> Marks | None:
    """Returns what changes when a file of a checkpoint is modified or replaced; None if the folder cannot be read."""
    try:
        stats = [(file, file.stat()) for file in sorted(path.rglob("*"))]
    except OSError:
        return None
    return [(str(file), each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for file, each in stats]


def inside(path: Path) -> Path:
    """Returns the checkpoints folder of a run folder; any other folder unchanged."""
    return path / "checkpoints" if os.path.isdir(path / "checkpoints") else path


def steps_in(folder: Path) -> Iterator[Path]:
    """Yields the paths named like checkpoints, oldest first.

    Raises:
        UnusableCheckpoint: the folder exists and cannot be read.
    """
    try:
        named = [folder / name for name in os.listdir(folder) if NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UnusableCheckpoint(f"{folder} cannot be read ({error.strerror or error})") from error
    yield from sorted(named, key=number)


def number(path: Path) -> int:
    """Returns the step in a checkpoint's name."""
    return int(path.name.partition("-")[2])
