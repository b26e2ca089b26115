"""Checkpoints of several ranks: rank 0 writes, and what it knows of the disk is what every rank acts by.

A disk that is full for one rank and not for the other, or a write that one has seen and the other has not, would lead
the ranks to different decisions. So whatever is asked of the disk is asked on rank 0 and told to all. All ranks must
make the same calls in the same order; each reads what it continues from by itself, so the run folder must be one that
all machines see.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stabletrain.ranks import Ranks, first_does, told
from stabletrain.state.checkpoint import NoCheckpoints
from stabletrain.state.notice import Report
from stabletrain.state.shards import whole
from stabletrain.state.tree import Tree
from stabletrain.state.trust import Checkpoint, peek


class SharedCheckpoints(NoCheckpoints):
    """Another's checkpoints, as all ranks see them.

    Args:
        own: what the configuration gave; only rank 0's is ever opened.
        ranks: this process among those of the run.
    """

    def __init__(self, own: NoCheckpoints, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self.keeps = own.keeps

    @property
    def failed(self) -> int:
        """Writes that failed, as this rank knows."""
        return self._own.failed

    def open(self, folder: Path, on_event: Report, run: str | None = None) -> None:
        """Opens rank 0's; all are refused if it is."""

        first_does(self._ranks, lambda: self._own.open(folder, on_event, run))

    def due(self, step: int) -> bool:
        """As the cadence says, which is the same on every rank."""
        return self._own.due(step)

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
    ) -> None:
        """Gathers what is sharded, and lets rank 0 write it."""
        if not self.keeps:
            return
        tree = whole(tree, self._ranks.first)
        if self._ranks.first:
            self._own.save(step, tree, info=info, healthy=healthy, val_loss=val_loss, anchor=anchor, here=here)

    def wait(self) -> None:
        """Returns when rank 0's last write has ended, on every rank."""

        def waited() -> BaseException | None:
            try:
                self._own.wait()
            except Exception as error:  # told to all: where one rank raises, so must the others
                return error
            return None

        if self.keeps and (error := self._ask(waited)) is not None:
            raise error

    def settle(self) -> None:
        """Rank 0's last write ends; the others may be gone by then."""
        self._own.settle()

    def saved(self, step: int) -> bool:
        """As rank 0 says."""
        return self._ask(lambda: self._own.saved(step))

    def unsaved(self) -> str | None:
        """As rank 0 says."""
        return self._ask(self._own.unsaved)

    def newest(self, *, healthy_only: bool = False, at_most: int | None = None) -> Checkpoint | None:
        """As rank 0 says."""
        return self._found(lambda: self._own.newest(healthy_only=healthy_only, at_most=at_most))

    def oldest(self) -> Checkpoint | None:
        """As rank 0 says."""
        return self._found(self._own.oldest)

    def reaches(self, step: int) -> bool:
        """As rank 0 says."""
        return self._ask(lambda: self._own.reaches(step))

    def preferred(self) -> Checkpoint | None:
        """As rank 0 says."""
        return self._found(self._own.preferred)

    def best(self) -> Checkpoint | None:
        """As rank 0 says."""
        return self._found(self._own.best)

    def rewind(self, step: int) -> None:
        """On rank 0."""
        if self._ranks.first:
            self._own.rewind(step)

    def _found(self, look: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        def path() -> Path | None:
            found = look()
            return None if found is None else found.path

        known = self._ask(path)
        return None if known is None else peek(known)

    def _ask(self, question: Callable[[], Any]) -> Any:
        return told(question() if self._ranks.first else None)
