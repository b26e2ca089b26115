"""Writes a checkpoint from several ranks. Each writes its own files; the folder appears when all are complete.

    .step-00000500.tmp-<pid>-<n>/   created by rank 0, which broadcasts its name
        model/  training/           one file per rank in each, written by `dcp.py`
        .part-00003                 rank 3's note, written last: sizes and SHA-256 of its files, and any bad tensor
        state.json  manifest.json   written by rank 0 after all ranks' notes; then one rename, as in `writer.py`

Writing happens on background threads, where collectives are not allowed: they belong to training. So the ranks
communicate through the folder. A rank that cannot write its files renames the folder, which works even on a full disk.
After that, no rank can complete the checkpoint. The folder's new name tells rank 0 which rank failed and why. Rank 0
waits for a limited time.
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
from stabletrain.checkpoint.reader import PARTED, SKELETON, parts_of
from stabletrain.checkpoint.tree import ShardWriters, Tree, flatten
from stabletrain.checkpoint.writer import WriteFile, unsound_among

PATIENCE = 600.0
"""Seconds that rank 0 waits for the other ranks after its own write; less if `ShardWriters.patience` is less."""

GRACE = 10.0
"""The same if the run is ending with an error: the other ranks may be gone."""

POLL = 0.02
"""Seconds between two checks for the other ranks' notes."""


def begin(folder: Path, step: int, serial: int) -> Path:
    """Creates the hidden folder of a checkpoint. Called by rank 0.

    Args:
        folder: the folder of checkpoints; created if it does not exist.
        step: of the checkpoint.
        serial: number of the attempt, so that late files of one attempt cannot get into the next.
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
    """One rank's shards of a state, copied to the host, and the code that writes them.

    Args:
        temporary: the hidden folder that `begin` created, visible to all ranks.
        writers: the ranks that write the state together.
        tree: the same on every rank except for the local shards; may live on a device, and change afterwards.
        ending: set when the run is ending with an error; rank 0 then waits for `GRACE` only.
        write_file: writes the files of tensors.
    """

    def __init__(
        self, temporary: Path, writers: ShardWriters, tree: Tree, ending: threading.Event, write_file: WriteFile
    ) -> None:
        from stabletrain.checkpoint.dcp import Copies  # slow to import, and a single process does without

        self.writers = writers
        self.temporary, self._ending, self._write_file = temporary, ending, write_file
        trees = {"model": tree["model"], "training": {key: child for key, child in tree.items() if key != "model"}}
        flat = {part: flatten(child) for part, child in trees.items()}
        self._skeleton: dict[str, Any] = {part: skeleton for part, (_, skeleton) in flat.items()}
        self._skeleton["shapes"] = {part: shapes(tensors) for part, (tensors, _) in flat.items()}
        self._copies = {part: Copies(tensors, writers.rank) for part, (tensors, _) in flat.items()}

    def write(self, healthy: bool) -> None:
        """Writes this rank's files and, last, the note that they are complete.

        Args:
            healthy: the caller's judgement; if True, the copies are inspected for bad values.

        Raises:
            BaseException: whatever went wrong. The folder is renamed first, so that it never becomes a checkpoint.
        """
        temporary, rank, count = self.temporary, self.writers.rank, self.writers.count
        try:
            files: dict[str, Any] = {}
            for part, copies in self._copies.items():
                written = copies.write(temporary / part, rank, count, self._write_file)
                files |= {f"{part}/{name}": entry for name, entry in written.items()}
            note = {"files": files, "bad": self._unsound() if healthy else None}
            # Write and rename: rank 0 must never read half a note.
            draft = temporary / f".draft-{rank:05d}"
            writer.write_file(draft, [json.dumps(note).encode()])
            draft.rename(note_of(temporary, rank))
        except BaseException as error:
            number = getattr(error, "errno", None) or 0
            with suppress(OSError):  # another rank has renamed it already
                temporary.rename(temporary.with_name(f"{failed_prefix(temporary)}{rank}-{number}"))
            raise

    def publish(self, folder: Path, about: Mapping[str, Any]) -> tuple[Path, str | None]:
        """Writes rank 0's files, waits for the other ranks' and publishes the checkpoint. Called by rank 0.

        Args:
            folder: the folder of checkpoints.
            about: `step`, `healthy`, `val_loss`, `info`.

        Returns:
            the path, and why a checkpoint believed healthy is not; else None.

        Raises:
            OSError: a rank could not write its files, or was too late. Nothing is left of the checkpoint then, and an
                older one of the same step is still there.
        """
        temporary = self.temporary
        try:
            try:
                self.write(about["healthy"])
            except OSError as error:
                raise self._failure(error) from error
            notes = self._notes()
            bad = next((note["bad"] for note in notes if note["bad"]), None)
            files = {name: entry for note in notes for name, entry in note["files"].items()}
            files = {name: files[name] for part in ("model", "training") for name in parts_of(part, files)}
            files[SKELETON] = writer.write_skeleton(temporary, self._skeleton)
            for rank in range(self.writers.count):
                note_of(temporary, rank).unlink()
            for part in self._copies:
                writer.sync(temporary / part)
        except BaseException:
            for left in (temporary, *temporary.parent.glob(f"{failed_prefix(temporary)}*")):
                writer.delete(left)
            raise
        judged = {**about, "healthy": about["healthy"] and bad is None}
        return writer.publish(temporary, folder, PARTED, judged, files), bad

    def _unsound(self) -> str | None:
        """Returns why the first bad tensor among this rank's weights, buffers and moments is bad; None if none is."""
        moments = self._copies["training"].copies.items()
        named = {f"model/{name}": copy for name, copy in self._copies["model"].copies.items()}
        named |= {
            name.replace("/state/", "/", 1): copy for name, copy in moments if name.startswith("optimizer/state/")
        }
        named |= {name: copy for name, copy in moments if name.startswith("average/tensors/")}
        return unsound_among(named)

    def _notes(self) -> list[dict[str, Any]]:
        """Waits for the notes of all ranks and returns them."""
        temporary, count = self.temporary, self.writers.count
        since, ending, missing = time.monotonic(), None, list(range(count))
        while missing := [rank for rank in missing if not note_of(temporary, rank).exists()]:
            if not temporary.exists():  # a rank has failed and renamed it
                raise self._failure()
            now = time.monotonic()
            if ending is None and self._ending.is_set():
                ending = now
            if now - since > min(PATIENCE, self.writers.patience) or (ending is not None and now - ending > GRACE):
                raise OSError(errno.ETIMEDOUT, f"rank {missing[0]} has not written its part within {now - since:.0f} s")
            time.sleep(POLL)
        return [json.loads(note_of(temporary, rank).read_bytes()) for rank in range(count)]

    def _failure(self, own: OSError | None = None) -> OSError:
        """Returns the error of the rank that failed, from the folder's new name; `own` if rank 0 failed first."""
        temporary = self.temporary
        for path in temporary.parent.glob(f"{failed_prefix(temporary)}*"):
            rank, number = (int(word) for word in path.name.removeprefix(failed_prefix(temporary)).split("-"))
            if rank != self.writers.rank:
                reason = os.strerror(number) if number else "an exception that is no I/O error"
                return OSError(number or errno.EIO, f"rank {rank}: {reason}")
        return own or OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(temporary))


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Returns the shapes of whole tensors. Without them, a lost piece at the end of a tensor would go unnoticed."""
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def note_of(temporary: Path, rank: int) -> Path:
    """Returns the path of the note that a rank writes when its files are complete."""
    return temporary / f".part-{rank:05d}"


def failed_prefix(temporary: Path) -> str:
    """Returns the prefix of the folder's name after a rank has failed; the rank and its errno follow."""
    return f"{temporary.name.replace('.tmp-', '.gone-')}-"
