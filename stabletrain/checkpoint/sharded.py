"""A checkpoint that several ranks write: each its own files, in one folder that appears when all of them are there.

    .step-00000500.tmp-<pid>-<n>/   made by rank 0, which tells the others
        model/  training/           a file of each rank in both, by `dcp.py`
        .part-00003                 rank 3's last: what it has written, sizes and SHA-256, and what is unsound in it
        state.json  manifest.json   rank 0's, when every rank has left its part; then one rename, as in `writer.py`

The ranks do not talk meanwhile: this happens on background threads, and collectives are training's. A rank that cannot
write its part renames the folder, for which a full disk has room: then nobody can make a checkpoint of it, and the
new name tells rank 0 who failed and why. What rank 0 waits for, it waits for within bounds.
"""

import errno
import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from stabletrain.checkpoint import writer
from stabletrain.checkpoint.dcp import Copies
from stabletrain.checkpoint.reader import PARTED, SKELETON, parts_of
from stabletrain.checkpoint.tree import ShardTarget, Tree, flatten
from stabletrain.checkpoint.writer import unsound_among

PATIENCE = 600.0
"""Seconds that rank 0 waits for the last part after its own: less than ranks wait for each other in a collective."""

GRACE = 10.0
"""The same when the run is ending with an error: the other ranks may be gone."""

POLL = 0.02
"""Seconds between two looks for the others' parts."""


def begin(folder: Path, step: int, serial: int) -> Path:
    """Makes the hidden folder of a checkpoint; called by rank 0.

    Args:
        folder: the folder of checkpoints; made where it does not exist.
        step: of the checkpoint.
        serial: of the attempt, so that no two share a folder: what is late of one must not get into the next.

    Raises:
        OSError: it cannot be made.
    """
    temporary = writer.hidden(folder, step, f"-{serial}")
    writer.delete(temporary)
    try:
        for part in ("model", "training"):
            (temporary / part).mkdir(parents=True)
    except OSError:
        writer.delete(temporary)
        raise
    return temporary


class RankShard:
    """One rank's part of a state, copied to the host, and its way to the disk.

    Args:
        place: where it goes.
        tree: the same on every rank but for the parts of sharded tensors; may live on a device, and change afterwards.
        ending: set when the run is ending with an error, so that rank 0 waits no longer than `GRACE`.
    """

    def __init__(self, place: ShardTarget, tree: Tree, ending: threading.Event) -> None:
        self.place, self._ending = place, ending
        trees = {"model": tree["model"], "training": {key: child for key, child in tree.items() if key != "model"}}
        flat = {part: flatten(child) for part, child in trees.items()}
        self._skeleton: dict[str, Any] = {part: skeleton for part, (_, skeleton) in flat.items()}
        self._skeleton["shapes"] = {part: shapes(tensors) for part, (tensors, _) in flat.items()}
        self._copies = {part: Copies(tensors, place.rank) for part, (tensors, _) in flat.items()}

    def write(self, healthy: bool) -> None:
        """Writes this rank's files and, last, the note that they are there.

        Args:
            healthy: what the caller believes; then the copies are looked at.

        Raises:
            BaseException: whatever went wrong; the folder has another name then, and is no checkpoint any more.
        """
        temporary, rank, count = self.place
        try:
            files: dict[str, Any] = {}
            for part, copies in self._copies.items():
                written = copies.write(temporary / part, rank, count, writer.write_file)
                files |= {f"{part}/{name}": entry for name, entry in written.items()}
            note = {"files": files, "bad": self._unsound() if healthy else None}
            draft = temporary / f".draft-{rank:05d}"
            writer.write_file(draft, [json.dumps(note).encode()])
            draft.rename(note_of(temporary, rank))
        except BaseException as error:
            number = getattr(error, "errno", None) or 0
            with suppress(OSError):  # another rank was before
                temporary.rename(temporary.with_name(f"{failed_prefix(temporary)}{rank}-{number}"))
            raise

    def publish(
        self, folder: Path, *, step: int, info: Mapping[str, Any], healthy: bool, val_loss: float | None
    ) -> tuple[Path, str | None]:
        """Rank 0's: leaves its own part, waits for the others' and makes a checkpoint of them all.

        Returns:
            the checkpoint, and what is unsound in it where it was believed healthy.

        Raises:
            OSError: a part could not be written, or did not come in time; nothing is left of the checkpoint then, and
                one that was to be replaced is still there.
        """
        temporary = self.place.temporary
        try:
            try:
                self.write(healthy)
            except OSError as error:
                raise self._failure(error) from error
            notes = self._notes()
            bad = next((note["bad"] for note in notes if note["bad"]), None)
            files = {name: entry for note in notes for name, entry in note["files"].items()}
            files = {name: files[name] for part in ("model", "training") for name in parts_of(part, files)}
            files[SKELETON] = writer.write_skeleton(temporary, self._skeleton)
            for rank in range(self.place.count):
                note_of(temporary, rank).unlink()
            for part in self._copies:
                writer.sync(temporary / part)
        except BaseException:
            for left in (temporary, *temporary.parent.glob(f"{failed_prefix(temporary)}*")):
                writer.delete(left)
            raise
        about = {"step": step, "healthy": healthy and bad is None, "val_loss": val_loss, "info": info}
        return writer.publish(temporary, folder, PARTED, about, files), bad

    def _unsound(self) -> str | None:
        """Why the first bad tensor among this rank's weights, buffers and moments is bad."""
        moments = self._copies["training"].copies.items()
        named = {f"model/{name}": copy for name, copy in self._copies["model"].copies.items()}
        named |= {
            name.replace("/state/", "/", 1): copy for name, copy in moments if name.startswith("optimizer/state/")
        }
        return unsound_among(named)

    def _notes(self) -> list[dict[str, Any]]:
        """What all ranks have left, when they have."""
        temporary, _, count = self.place
        since, ending, missing = time.monotonic(), None, list(range(count))
        while missing := [rank for rank in missing if not note_of(temporary, rank).exists()]:
            if not temporary.exists():
                raise self._failure()
            now = time.monotonic()
            if ending is None and self._ending.is_set():
                ending = now
            if now - since > PATIENCE or (ending is not None and now - ending > GRACE):
                raise OSError(errno.ETIMEDOUT, f"rank {missing[0]} has not written its part within {now - since:.0f} s")
            time.sleep(POLL)
        return [json.loads(note_of(temporary, rank).read_bytes()) for rank in range(count)]

    def _failure(self, own: OSError | None = None) -> OSError:
        """What the folder's new name says of the rank that failed; rank 0's own error, where it was the first."""
        temporary = self.place.temporary
        for path in temporary.parent.glob(f"{failed_prefix(temporary)}*"):
            rank, number = (int(word) for word in path.name.removeprefix(failed_prefix(temporary)).split("-"))
            if rank != self.place.rank:
                reason = os.strerror(number) if number else "an error of the program"
                return OSError(number or errno.EIO, f"rank {rank}: {reason}")
        return own or OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(temporary))


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The shapes of whole tensors: without them, a piece that is lost at a tensor's end would go unseen."""
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def note_of(temporary: Path, rank: int) -> Path:
    """What a rank leaves when its files are written."""
    return temporary / f".part-{rank:05d}"


def failed_prefix(temporary: Path) -> str:
    """How the folder's name begins when a rank has failed; its number follows, and that of the error."""
    return f"{temporary.name.replace('.tmp-', '.gone-')}-"
