"""Faults outside the step: a full disk, a kill during a write, W&B unreachable.

`DiskFull` and `Kill` interrupt the checkpoint taken after `at` executed steps (ticks), with one file half-written.
Without rollbacks, that is the checkpoint of this step. Other checkpoints are written exactly as with `faults=none`.

After `LostWandb`, every call into the library raises ConnectionError, as without a network.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stabletrain.checkpoint import writer
from stabletrain.errors import ConfigError
from stabletrain.faults.planned import OnRank, Planned, say

Content = Iterable[bytes | memoryview]


@dataclass(frozen=True)
class DiskFault(OnRank):
    """A fault during the write of a checkpoint; `at` counts ticks done.

    Attributes:
        rank: rank that has the fault; None for every rank that writes. Ranks other than 0 write only with fsdp.
    """

    rank: int | None = 0

    def checkpoints(self, checkpoints: Any) -> Any:
        """Makes the write of a checkpoint fail at each planned tick; returns the same object.

        Raises:
            ConfigError: the run writes no checkpoints.
        """
        if not checkpoints.keeps:
            raise ConfigError("a fault in a checkpoint has no effect with checkpoint=off: use checkpoint=default")
        save, spared = checkpoints.save, self.spared(checkpoints)

        def save_ill_fated(step: int, tree: Mapping[str, Any], **rest: Any) -> None:
            if self.happens_here(tree["tick"]) and step not in spared:
                interrupt(step, lambda path: self.happen(path, step))
            save(step, tree, **rest)

        checkpoints.save = save_ill_fated
        return checkpoints

    def spared(self, checkpoints: Any) -> set[int]:
        """Returns the steps whose checkpoints are written without the fault."""
        del checkpoints
        return set()

    def happen(self, path: Path, step: int) -> None:
        """Runs the fault when half of the file `path` is written."""
        raise NotImplementedError


@dataclass(frozen=True)
class DiskFull(DiskFault):
    """Raises ENOSPC when a checkpoint is half-written."""

    def happen(self, path: Path, step: int) -> None:
        say(f"disk full in the checkpoint of step {step}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@dataclass(frozen=True)
class Kill(DiskFault):
    """Kills the process (SIGKILL) when a checkpoint is half-written.

    A process that finds a half-written checkpoint of a step is not killed there again, so `resume=auto` finishes the
    run. With several ranks this holds for rank 0 only.
    """

    def spared(self, checkpoints: Any) -> set[int]:
        """Returns the steps of half-written checkpoints: a set that is filled when the folder is opened."""
        known: set[int] = set()
        open_ = checkpoints.open  # deletes half-written checkpoints, so look before it

        def look_and_open(folder: Path, *rest: Any) -> None:
            known.update(int(left.name[6:14]) for left in (folder / "checkpoints").glob(".step-*.tmp-*"))
            open_(folder, *rest)

        checkpoints.open = look_and_open
        return known

    def happen(self, path: Path, step: int) -> None:
        say(f"kill -9 in the checkpoint of step {step}")
        os.kill(os.getpid(), signal.SIGKILL)


def interrupt(step: int, happen: Callable[[Path], None]) -> None:
    """Calls `happen` once, when half of the second file of the checkpoint of `step` is written."""
    # A background thread writes checkpoints, so the function that writes files is replaced; the replacement restores
    # the original at that file.
    write = writer.write_file

    def write_half(path: Path, content: Content) -> dict[str, Any]:
        second = path.name == writer.TRAINING or path.parent.name == "training"
        if not second or f"{os.sep}.step-{step:08d}." not in str(path):
            return write(path, content)
        writer.write_file = write
        return write(path, half(content, lambda: happen(path)))

    writer.write_file = write_half  # ty: ignore[invalid-assignment]


def half(content: Content, happen: Callable[[], None]) -> Content:
    """Yields the first half of `content`'s bytes without copying them, then calls `happen`."""
    pieces = list(content)
    left = sum(len(piece) for piece in pieces) // 2
    for piece in pieces:
        yield piece[:left]
        left -= min(left, len(piece))
    happen()


class Unreachable:
    """Replaces a W&B run: every access raises ConnectionError.

    Args:
        run: the original W&B run; `finish` ends it.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"wandb is unreachable ({name})")

    def finish(self, exit_code: int) -> None:
        """Ends the original run, so that its files are complete, and raises ConnectionError."""
        self._run.finish(exit_code=exit_code)
        raise ConnectionError("wandb is unreachable (finish)")


@dataclass(frozen=True)
class LostWandb(Planned):
    """Makes W&B unreachable from the first of the ticks `at` on; at 0 it does not even start."""

    def wandb(self, wandb: Any) -> Any:
        """Makes W&B unreachable at the planned tick; returns the same object.

        Raises:
            ConfigError: the run does not use W&B.
        """
        if not hasattr(wandb, "mode"):
            raise ConfigError("faults=wandb has no effect with wandb=disabled: use wandb=offline")
        first, log = min(self.at), wandb.log
        if first == 0:
            wandb._begin = refuse

        def log_or_lose(step: int, metrics: Mapping[str, Any]) -> None:
            tick = metrics.get("tick", step)
            if tick >= first and wandb._run is not None and not isinstance(wandb._run, Unreachable):
                say(f"wandb is unreachable from tick {tick} on")
                wandb._run = Unreachable(wandb._run)
            log(step, metrics)

        wandb.log = log_or_lose
        return wandb


def refuse(*_: Any) -> Any:
    """Replaces the start of a W&B run: raises ConnectionError."""
    raise ConnectionError("wandb is unreachable (init)")
