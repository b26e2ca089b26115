"""Checkpoints of several ranks: what rank 0 knows of the disk is what every rank acts by.

What all ranks have whole (ddp), rank 0 writes. Of what is sharded (fsdp) every rank writes its part, which rank 0 makes
one checkpoint of (`checkpoint/sharded.py`). Reading a checkpoint through before it is used is shared: each rank reads
some of its files, and only if no rank finds fault is it used.

A disk that is full for one rank and not for the other, or a write that one has seen and the other has not, would lead
the ranks to different decisions. So whatever is asked of the disk is asked on rank 0 and told to all. All ranks must
make the same calls in the same order; each reads what it continues from, or its part of it, by itself: so the run
folder must be one that all machines see.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stabletrain.checkpoint.checkpoints import Checkpoints, NoCheckpoints
from stabletrain.checkpoint.folder import OnEvent
from stabletrain.checkpoint.reader import Checkpoint, UnusableCheckpoint, peek, verify
from stabletrain.checkpoint.tree import ShardTarget, Tree, flatten, is_sharded
from stabletrain.parallel.ranks import Ranks, all_gather_object, broadcast_object, run_on_main


class SharedCheckpoints(NoCheckpoints):
    """Another's checkpoints, as all ranks see them.

    Args:
        own: what the configuration gave; only rank 0's is ever opened.
        ranks: this process among those of the run.
    """

    def __init__(self, own: Checkpoints | NoCheckpoints, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        own.verify = self._verify
        self.keeps = own.keeps

    @property
    def failed(self) -> int:
        """Writes that failed, as this rank knows."""
        return self._own.failed

    def open(self, folder: Path, on_event: OnEvent, run: str | None = None) -> None:
        """Opens rank 0's; all are refused if it is."""

        run_on_main(self._ranks, lambda: self._own.open(folder, on_event, run))

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
        place: ShardTarget | None = None,
    ) -> None:
        """Has rank 0 write a state that is whole on every rank, and every rank its part of one that is sharded."""
        del place
        if not self.keeps:
            return
        about: dict[str, Any] = {"info": info, "healthy": healthy, "val_loss": val_loss, "anchor": anchor, "here": here}
        if not any(map(is_sharded, flatten(tree)[0].values())):
            if self._ranks.is_main:
                self._own.save(step, tree, **about)
            return
        self.wait()
        temporary = self._ask(lambda: self._own.begin(step))
        if temporary is not None:
            self._own.save(step, tree, **about, place=ShardTarget(temporary, self._ranks.rank, self._ranks.world_size))

    def wait(self) -> None:
        """Returns when the last write has ended, on every rank; raises what one of them has raised on all."""
        if not self.keeps:
            return
        raised: BaseException | None = None
        try:
            self._own.wait()
        except Exception as error:
            raised = error
        for error in all_gather_object(raised):
            if error is not None:
                raise error

    def finish_quietly(self) -> None:
        """This rank's last write ends; the others may be gone by then."""
        self._own.finish_quietly()

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

    def find(self, path: Path) -> Checkpoint:
        """As rank 0 says."""
        found = self._found(lambda: self._own.find(path))
        assert found is not None, "find raises where there is none"
        return found

    def rewind(self, step: int) -> None:
        """On rank 0."""
        self._ask(lambda: self._own.rewind(step))

    def _found(self, look: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        def path() -> Path | None:
            found = look()
            return None if found is None else found.path

        known = self._ask(path)
        return None if known is None else peek(known)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Rank 0's answer, or its refusal, on every rank; meanwhile the others read what it asks them to read."""
        if self._ranks.is_main:
            answer, raised = None, None
            try:
                answer = question()
            except Exception as error:  # told to all: where one rank raises, so must the others
                raised = error
            broadcast_object((None, answer, raised))
        else:
            path, answer, raised = broadcast_object(None)
            while path is not None:
                all_gather_object(self._fault(path))
                path, answer, raised = broadcast_object(None)
        if raised is not None:
            raise raised
        return answer

    def _verify(self, path: Path) -> Checkpoint:
        """Rank 0's, within `_ask`: has every rank read its share of a checkpoint.

        Raises:
            UnusableCheckpoint: one of them finds fault with it.
        """
        found = peek(path)
        broadcast_object((path, None, None))
        for fault in all_gather_object(self._fault(path)):
            if fault:
                raise UnusableCheckpoint(fault)
        return found

    def _fault(self, path: Path) -> str:
        try:
            verify(path, self._ranks.rank, self._ranks.world_size)
        except UnusableCheckpoint as error:
            return str(error)
        return ""


def for_all_ranks(checkpoints: Checkpoints | NoCheckpoints, ranks: Ranks) -> Checkpoints | NoCheckpoints:
    """The checkpoints that several ranks share; of one process its own."""
    return SharedCheckpoints(checkpoints, ranks) if ranks.distributed else checkpoints
