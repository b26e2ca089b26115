"""Checkpoints switched off, for short runs and sweeps that are never resumed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.checkpoint.folder import OnEvent, Verify, find
from stabletrain.checkpoint.reader import Checkpoint, verify
from stabletrain.checkpoint.tree import ShardTarget, Tree


class NoCheckpoints:
    """Writes nothing and resumes from nothing. The methods do the same as those of `Checkpoints`.

    Attributes:
        keeps: whether any checkpoint is ever saved.
        failed: number of failed writes in this process.
        verify: reads a checkpoint in full before it is used; several ranks share that work.
    """

    keeps = False
    failed = 0
    verify: Verify = staticmethod(verify)

    def open(self, folder: Path, on_event: OnEvent, run: str | None = None) -> None:
        """Does nothing."""

    def due(self, step: int) -> bool:
        """Returns False."""
        return False

    def begin(self, step: int) -> Path | None:
        """Returns None: nothing is written."""
        del step
        return None

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
        place: ShardTarget | None = None,
    ) -> None:
        """Does nothing."""

    def wait(self) -> None:
        """Does nothing."""

    def finish_quietly(self) -> None:
        """Does nothing."""

    def saved(self, step: int) -> bool:
        """Returns False."""
        del step
        return False

    def unsaved(self) -> str | None:
        """Returns None: no state was to be saved."""
        return None

    def newest(self, *, healthy_only: bool = False, at_most: int | None = None) -> Checkpoint | None:
        """Returns None."""
        return None

    def oldest(self) -> Checkpoint | None:
        """Returns None."""
        return None

    def reaches(self, step: int) -> bool:
        """Returns True: with checkpoints off, a rollback need not save an older state."""
        del step
        return True

    def preferred(self) -> Checkpoint | None:
        """Returns None."""
        return None

    def best(self) -> Checkpoint | None:
        """Returns None."""
        return None

    def find(self, path: Path) -> Checkpoint:
        """Returns a checkpoint of any run; see `folder.find`."""
        return find(path, verify=self.verify)

    def accept(self, found: Checkpoint, fault: str) -> bool:
        """Returns whether a checkpoint's state could be used."""
        del found
        return not fault

    def rewind(self, step: int) -> None:
        """Does nothing."""
