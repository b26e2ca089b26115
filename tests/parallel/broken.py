"""Breaks one part of explaining an incident, on one rank, and counts what the ranks gather meanwhile."""

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import OutOfMemoryError

from stabletrain.checkpoint.tree import Piece
from stabletrain.parallel.ranks import current_ranks
from stabletrain.parallel.whole import Gather, GatheredState

FORENSICS, TRAINER = "stabletrain.forensics", "stabletrain.trainer.incidents"


def raises(error: Exception) -> Callable[..., Any]:
    """A function that raises `error`, whatever it is called with."""

    def raising(*_: Any, **__: Any) -> Any:
        raise error

    return raising


def fails_on(method: Callable[..., Any], which: Callable[[Any], bool]) -> Callable[..., Any]:
    """A method of `Gather` that fails for the shards that `which` selects."""

    def failing(self: Gather, *arguments: Any) -> Any:
        shard = next(each for each in arguments if hasattr(each, "to_local") or isinstance(each, Piece))
        if which(shard):
            raise RuntimeError("this shard cannot be read")
        return method(self, *arguments)

    return failing


def is_piece(shard: Any) -> bool:
    """Whether a shard belongs to a snapshot, and not to the model in training."""
    return isinstance(shard, Piece)


BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "memory": ("stabletrain.parallel.whole.free_host_memory", lambda: 1e4),
    "budget": (f"{FORENSICS}.handler.IncidentHandler.has_budget", raises(OSError(errno.ESTALE, "Stale file handle"))),
    "make": (f"{TRAINER}.make_repro", raises(ValueError("no repro"))),
    "samples": (f"{TRAINER}.bad_samples", raises(ValueError("no samples"))),
    "prepare": ("stabletrain.parallel.whole.GatheredState.prepare", raises(MemoryError("no room for a model"))),
    "send": (
        "stabletrain.parallel.whole.Gather._pack",
        fails_on(Gather._pack, lambda shard: not is_piece(shard)),
    ),
    "receive": (
        "stabletrain.parallel.whole.Gather._unpack",
        fails_on(Gather._unpack, lambda shard: len(shard.shape) > 1),
    ),
    "older": ("stabletrain.checkpoint.snapshots.Snapshots.newest", raises(RuntimeError("no snapshot"))),
    "send older": ("stabletrain.parallel.whole.Gather._pack", fails_on(Gather._pack, is_piece)),
    "replay": (f"{FORENSICS}.replay.forward_backward", raises(RuntimeError("no replay"))),
    "investigate": (f"{FORENSICS}.handler.investigate", raises(RuntimeError("no findings"))),
    "killed": (f"{FORENSICS}.handler.investigate", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)),
    "diagnose": (f"{FORENSICS}.subject.diagnose", raises(RuntimeError("no diagnosis"))),
    "write": (f"{FORENSICS}.handler.file_incident", raises(TypeError("no JSON"))),
    "disk": (f"{FORENSICS}.handler.file_incident", raises(OSError(errno.ENOSPC, "No space left on device"))),
    "second run": ("stabletrain.guard.checks.repeats.compare", raises(OutOfMemoryError("no memory"))),
    "copied tensor": ("stabletrain.guard.checks.repeats.OneTensor.of", raises(OutOfMemoryError("no memory"))),
    "machine": ("stabletrain.guard.checks.neighbours.machine_of", lambda _: ("another card",)),
    "copied buckets": ("stabletrain.parallel.ddp.within_memory", lambda _: None),
}
"""What is replaced, and by what, for each part."""


@contextmanager
def broken(part: str | None, rank: int) -> Generator[Counter[str]]:
    """Breaks a part on one rank; None breaks nothing. Yields the numbers of gathers and of copied snapshots."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return counting

    target, instead = BROKEN[part] if part and current_ranks().rank == rank else ("", None)
    with (
        patch.object(Gather, "run", counted("gathers", Gather.run)),
        patch.object(GatheredState, "gather_older", counted("older", GatheredState.gather_older)),
        patch.object(Piece, "on", counted("attached", Piece.on)),
    ):
        if instead is None:
            yield calls
        else:
            with patch(target, instead):
                yield calls
