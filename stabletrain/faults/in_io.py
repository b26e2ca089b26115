"""Faults outside of the step: a full disk, a kill during a write, W&B out of reach.

Faults in the writing of a checkpoint: the disk is full, or the process is killed, with one file half-written.

They happen at the checkpoint that is taken when `at` ticks are done: as long as nothing was rolled back, the one of
that step. The checkpoints of other ticks are written by the very code that writes them with `faults=none`.

W&B out of reach: from a tick on, every call into the library raises what a lost network raises.
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
    """A fault within the writing of a checkpoint; `at` counts ticks done.

    Attributes:
        rank: the rank that meets it; None for every rank that writes. A rank other than 0 writes with fsdp only.
    """

    rank: int | None = 0

    def checkpoints(self, checkpoints: Any) -> Any:
        """The same checkpoints, whose write at a planned tick does not end well.

        Raises:
            ConfigError: nothing is ever written.
        """
        if not checkpoints.keeps:
            raise ConfigError("a fault in a checkpoint does nothing with checkpoint=off: use checkpoint=default")
        save, spared = checkpoints.save, self.spared(checkpoints)

        def save_ill_fated(step: int, tree: Mapping[str, Any], **rest: Any) -> None:
            if self.hits(tree["tick"]) and step not in spared:
                interrupt(step, lambda path: self.happen(path, step))
            save(step, tree, **rest)

        checkpoints.save = save_ill_fated
        return checkpoints

    def spared(self, checkpoints: Any) -> set[int]:
        """Steps whose checkpoints nothing happens to after all."""
        del checkpoints
        return set()

    def happen(self, path: Path, step: int) -> None:
        """What happens when half of the file `path` is written."""
        raise NotImplementedError


@dataclass(frozen=True)
class DiskFull(DiskFault):
    """No space is left when a checkpoint is half-written."""

    def happen(self, path: Path, step: int) -> None:
        say(f"disk full in the checkpoint of step {step}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@dataclass(frozen=True)
class Kill(DiskFault):
    """The process is killed (SIGKILL) when a checkpoint is half-written.

    A process that finds a checkpoint half-written follows one that was killed there, and is spared: so `resume=auto`
    carries such a run to its end. Of several ranks it is rank 0 that looks, and only rank 0 is spared.
    """

    def spared(self, checkpoints: Any) -> set[int]:
        """Steps whose half-written checkpoints are found when the folder is opened, which clears them away."""
        known: set[int] = set()
        open_ = checkpoints.open

        def look_and_open(folder: Path, *rest: Any) -> None:
            known.update(int(left.name[6:14]) for left in (folder / "checkpoints").glob(".step-*.tmp-*"))
            open_(folder, *rest)

        checkpoints.open = look_and_open
        return known

    def happen(self, path: Path, step: int) -> None:
        say(f"kill -9 in the checkpoint of step {step}")
        os.kill(os.getpid(), signal.SIGKILL)


def interrupt(step: int, happen: Callable[[Path], None]) -> None:
    """Has `happen` called, once, when the first half of the second file of the checkpoint of `step` is written.

    Checkpoints are written on a thread of their own. So the function that writes files is exchanged for one that puts
    it back as soon as it meets that file.
    """
    write = writer.write_file

    def write_half(path: Path, content: Content) -> dict[str, Any]:
        second = path.name == writer.TRAINING or path.parent.name == "training"
        if not second or f"{os.sep}.step-{step:08d}." not in str(path):
            return write(path, content)
        writer.write_file = write
        return write(path, half(content, lambda: happen(path)))

    writer.write_file = write_half  # ty: ignore[invalid-assignment]


def half(content: Content, happen: Callable[[], None]) -> Content:
    """The first half of `content`'s bytes, without a copy of them, and then what happens."""
    pieces = list(content)
    left = sum(len(piece) for piece in pieces) // 2
    for piece in pieces:
        yield piece[:left]
        left -= min(left, len(piece))
    happen()


class Unreachable:
    """What the library is from then on: whatever is asked of it raises.

    Args:
        run: the library's run, which is ended quietly when the training run ends.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"wandb is unreachable ({name})")

    def finish(self, exit_code: int) -> None:
        """Ends the library's run, so that its files are whole, and raises as all else does."""
        self._run.finish(exit_code=exit_code)
        raise ConnectionError("wandb is unreachable (finish)")


@dataclass(frozen=True)
class LostWandb(Planned):
    """W&B is out of reach from the first of the ticks `at` on; at 0 it cannot even be started."""

    def wandb(self, wandb: Any) -> Any:
        """The same object, behind which the library gets lost.

        Raises:
            ConfigError: W&B is not used.
        """
        if not hasattr(wandb, "mode"):
            raise ConfigError("faults=wandb does nothing with wandb=disabled: use wandb=offline")
        first, log = min(self.at), wandb.log
        if first == 0:
            wandb._begin = refuse

        def log_or_lose(step: int, metrics: Mapping[str, Any]) -> None:
            tick = metrics.get("tick", step)
            if tick >= first and wandb._run is not None and not isinstance(wandb._run, Unreachable):
                say(f"wandb is out of reach from tick {tick} on")
                wandb._run = Unreachable(wandb._run)
            log(step, metrics)

        wandb.log = log_or_lose
        return wandb


def refuse(*_: Any) -> Any:
    """What the library answers to a new run."""
    raise ConnectionError("wandb is unreachable (init)")
