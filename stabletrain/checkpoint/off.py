"""No checkpoints: nothing is kept on disk, for short runs and sweeps that nobody continues."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stabletrain.checkpoint.folder import OnEvent, Verify, find
from stabletrain.checkpoint.reader import Checkpoint, verify
from stabletrain.checkpoint.tree import ShardTarget, Tree


class NoCheckpoints:
    """Keeps nothing on disk and continues from nothing.

    Attributes:
        keeps: whether anything is ever saved.
        failed: writes that failed in this process.
        verify: reads a checkpoint through before it is used; several ranks share that work.
    """

    keeps = False
    failed = 0
    verify: Verify = staticmethod(verify)

    def open(self, folder: Path, on_event: OnEvent, run: str | None = None) -> None:
        """Nothing to open."""

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def begin(self, step: int) -> Path | None:
        """Nothing is written."""
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
        anchor: int | None = None,
        here: bool = True,
        place: ShardTarget | None = None,
    ) -> None:
        """Nothing is saved."""

    def wait(self) -> None:
        """Nothing is under way."""

    def finish_quietly(self) -> None:
        """Nothing is under way."""

    def saved(self, step: int) -> bool:
        """Whether the newest write that ended was of `step`, and succeeded: no."""
        del step
        return False

    def unsaved(self) -> str | None:
        """What a person must know at the end: nothing was to be saved."""
        return None

    def newest(self, *, healthy_only: bool = False, at_most: int | None = None) -> Checkpoint | None:
        """None."""
        return None

    def oldest(self) -> Checkpoint | None:
        """None."""
        return None

    def reaches(self, step: int) -> bool:
        """Whether a checkpoint of that step or an earlier one is there: nothing is ever asked for."""
        del step
        return True

    def preferred(self) -> Checkpoint | None:
        """None."""
        return None

    def best(self) -> Checkpoint | None:
        """None."""
        return None

    def find(self, path: Path) -> Checkpoint:
        """A checkpoint of any run; see `folder.find`."""
        return find(path, verify=self.verify)

    def rewind(self, step: int) -> None:
        """Nothing to forget."""
