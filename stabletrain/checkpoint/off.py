"""Checkpoints switched off, for short runs and sweeps that are never resumed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.checkpoint.folder import OnEvent, Verify, find
from stabletrain.checkpoint.reader import Checkpoint, verify
from stabletrain.checkpoint.tree import ShardWriters, Tree


class NoCheckpoints:
    """Writes nothing and resumes from nothing. Base class of all checkpoints, and what each must offer.

    Attributes:
        keeps: whether any checkpoint is ever saved.
    """

    keeps = False
    _verify: Verify = staticmethod(verify)

    def open(self, folder: Path, on_event: OnEvent, run: str | None = None, verify: Verify = verify) -> None:
        """Sets the run folder. Called before any other method but `find`; this one only keeps `verify`.

        Args:
            folder: the run folder; created if it does not exist.
            on_event: receives `checkpoint`, `checkpoint_failed` and `checkpoint_skipped`, also from the writing thread.
            run: id of the run. Checkpoints with another id in `info["run"]` are skipped.
            verify: reads a checkpoint in full before it is used; several ranks share that work.

        Raises:
            ConfigError: no checkpoint can be written there.
        """
        self._verify = verify

    # ---- saving

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step` steps: never."""
        return False

    def save(
        self,
        step: int,
        tree: Tree,
        *,
        info: Mapping[str, Any],
        healthy: bool,
        val_loss: float | None,
        anchors: Sequence[int] = (),
        here: bool = True,
        writers: ShardWriters | None = None,
    ) -> None:
        """Saves a state, and deletes the checkpoints that are no longer needed. Does nothing.

        The checkpoints of later steps, which became obsolete when the run went back, are deleted too.

        Args:
            step: steps done. An existing checkpoint of that step is replaced.
            tree: from `capture`; may share memory with the live state, which may change as soon as this returns.
            info: plain JSON values to store in the checkpoint.
            healthy: the caller's judgement. A checkpoint with bad weights or moments (`writer.py`) is never healthy.
            val_loss: nats per target; None if not known.
            anchors: for each of these steps, the newest checkpoint of at most that step is kept, however old it is.
            here: whether the run is at that step now. If not (an older state is saved), no later checkpoint is deleted.
            writers: the ranks that write a sharded state together, each its shards; all of them call this. None if
                this process writes the whole state.

        Raises:
            TypeError: the tree or `info` holds a value that cannot be saved without pickle.
        """

    def wait(self) -> None:
        """Waits for the last write to end."""

    def finish_quietly(self) -> None:
        """Waits for the last write to end. Raises nothing: the run is already ending with an error."""

    def unsaved(self) -> str | None:
        """Returns one line for the end of a run whose last state could not be written; else None."""
        return None

    # ---- reading

    def newest(self, *, healthy_only: bool = False, at_most: int | None = None) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies, of at most that step; None if there is none."""
        return None

    def oldest(self) -> Checkpoint | None:
        """Returns the oldest healthy checkpoint that verifies; None if there is none."""
        return None

    def preferred(self) -> Checkpoint | None:
        """Returns the checkpoint to resume from; None if there is none."""
        return None

    def best(self) -> Checkpoint | None:
        """Returns the checkpoint with the lowest validation loss among the healthy ones that verify; None if none."""
        return None

    def find(self, path: Path) -> Checkpoint:
        """Returns a checkpoint of any run; see `folder.find`."""
        return find(path, verify=self._verify)

    def accept(self, found: Checkpoint, fault: str) -> bool:
        """Returns whether a checkpoint's state could be used; if not, it is skipped from now on.

        Args:
            found: the checkpoint.
            fault: why this process cannot use it; empty if it can.
        """
        return not fault

    def reaches(self, step: int) -> bool:
        """Returns whether a rollback to `step` needs no older state saved: always true without checkpoints."""
        return True

    def rewind(self, step: int) -> None:
        """Deletes the checkpoints after `step`, which a rollback made obsolete. Does nothing."""
