"""Faults outside the step: a full disk, a kill during a write, W&B unreachable.

`DiskFull` and `Kill` interrupt the checkpoint taken after `at` executed steps (ticks), with one file half-written.
Without rollbacks, that is the checkpoint of this step. Other checkpoints are written exactly as with `faults=none`.

After `LostWandb`, every call into the library raises ConnectionError, as without a network.
"""

import errno
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from stabletrain.beside.faults.planned import OnRank, Planned, say
from stabletrain.checkpoint import writer
from stabletrain.checkpoint.checkpoints import Checkpoints
from stabletrain.checkpoint.folder import OnEvent, Verify
from stabletrain.checkpoint.reader import verify
from stabletrain.checkpoint.tree import Tree
from stabletrain.checkpoint.writer import FileContent
from stabletrain.errors import ConfigError
from stabletrain.tracking.wandb import Wandb


@dataclass(frozen=True)
class DiskFault(OnRank):
    """A fault during the write of a checkpoint; `at` counts ticks done.

    Attributes:
        rank: rank that has the fault; None for every rank that writes. Ranks other than 0 write only with fsdp.
        spares_half_written: whether a step is spared if this process has found its checkpoint half-written.
    """

    rank: int | None = 0
    spares_half_written: ClassVar[bool] = False

    def checkpoints(self, checkpoints: Any) -> Checkpoints:
        """Returns checkpoints of which each planned one is interrupted.

        Raises:
            ConfigError: the run writes no checkpoints, or by code of the user's own.
        """
        if not checkpoints.keeps:
            raise ConfigError(
                "a fault in a checkpoint (faults=disk_full, faults=kill) has no effect with checkpoint=off; fix: "
                "checkpoint=default"
            )
        if type(checkpoints) not in (Checkpoints, InterruptedCheckpoints):
            raise ConfigError(
                f"a fault in a checkpoint has no effect on those of {type(checkpoints).__name__}: use "
                "checkpoint=default"
            )
        return InterruptedCheckpoints(checkpoints, self)

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

    spares_half_written: ClassVar[bool] = True

    def happen(self, path: Path, step: int) -> None:
        say(f"kill -9 in the checkpoint of step {step}")
        os.kill(os.getpid(), signal.SIGKILL)


class InterruptedCheckpoints(Checkpoints):
    """Checkpoints with faults: a planned one is interrupted when its second file is half written.

    Args:
        own: the run's checkpoints; their own faults come first.
        fault: says which ones.
    """

    def __init__(self, own: Checkpoints, fault: DiskFault) -> None:
        super().__init__(own.every, own.keep, own.keep_best, own.asynchronous)
        self._faults: list[DiskFault] = [*getattr(own, "_faults", []), fault]
        self._half_written: set[int] = set()
        self._planned: dict[int, DiskFault] = {}  # by the step whose checkpoint it interrupts

    def open(self, folder: Path, on_event: OnEvent, run: str | None = None, verify: Verify = verify) -> None:
        """Notes the steps of half-written checkpoints before it deletes these."""
        self._half_written = {int(left.name[6:14]) for left in (folder / "checkpoints").glob(".step-*.tmp-*")}
        super().open(folder, on_event, run, verify)

    def save(self, step: int, tree: Tree, **about: Any) -> None:
        """Plans the fault if there is one for the state's tick."""
        self.wait()  # the fault must not reach an earlier write of the same step
        for fault in self._faults:
            spared = fault.spares_half_written and step in self._half_written
            if fault.happens_here(tree["tick"]) and not spared:
                self._planned.setdefault(step, fault)
        super().save(step, tree, **about)

    def write_file(self, path: Path, content: FileContent) -> dict[str, Any]:
        """Interrupts the second file of a checkpoint with a fault."""
        if path.name == writer.TRAINING or path.parent.name == "training":
            for step, fault in [*self._planned.items()]:
                if f"{os.sep}.step-{step:08d}." in str(path):
                    del self._planned[step]
                    content = half(content, partial(fault.happen, path, step))
        return super().write_file(path, content)


def half(content: FileContent, happen: Callable[[], None]) -> FileContent:
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

    def wandb(self, wandb: Any) -> Wandb:
        """Returns W&B that is unreachable from the planned tick on.

        Raises:
            ConfigError: the run does not use W&B.
        """
        if not isinstance(wandb, Wandb):
            raise ConfigError("faults=wandb has no effect with wandb=disabled: use wandb=offline")
        return InterruptedWandb(wandb, min(self.at))


class InterruptedWandb(Wandb):
    """W&B that becomes unreachable.

    Args:
        own: the run's W&B, not started yet.
        first: the tick from which on it is unreachable.
    """

    def __init__(self, own: Wandb, first: int) -> None:
        super().__init__(own.mode, own.project, own.entity, own.group, own.name, own.tags)
        self._first = min(first, getattr(own, "_first", first))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the metrics of a step, if W&B can be reached."""
        tick = metrics.get("tick", step)
        if tick >= self._first and self._run is not None and not isinstance(self._run, Unreachable):
            say(f"wandb is unreachable from tick {tick} on")
            self._run = Unreachable(self._run)
        super().log(step, metrics)

    def _begin(self, *given: Any, **named: Any) -> Any:
        if self._first == 0:
            raise ConnectionError("wandb is unreachable (init)")
        return super()._begin(*given, **named)
