"""Checkpoints of several ranks: rank 0 checks the disk, and every rank acts on its answer.

If each rank checked by itself, a disk that is full for one rank only would lead the ranks to different decisions. All
ranks must make the same calls in the same order.

With DDP, rank 0 writes the whole state. With FSDP every rank writes its shards, with HSDP those of the first copy, and
rank 0 turns them into one checkpoint (`checkpoint/sharded.py`). The ranks share the work of verifying a checkpoint.
Each rank then loads it, or its shards, by itself, so the run folder must be visible to all machines.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stabletrain.checkpoint.folder import OnEvent, Verify
from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.checkpoint.reader import Checkpoint, UnusableCheckpoint, peek, verify
from stabletrain.checkpoint.tree import ShardWriters, Tree, flatten, is_sharded
from stabletrain.parallel.ranks import Ranks, all_gather_object, broadcast_object, run_on_main, timeout

SHARE = 2 / 3
"""Of the time that the ranks wait for rank 0, the share that rank 0 waits for their parts of a checkpoint."""


class SharedCheckpoints(NoCheckpoints):
    """The checkpoints of a run with several ranks. Every rank gets rank 0's answers and exceptions.

    Args:
        own: the configured checkpoints. Only rank 0 opens them.
        ranks: this process among those of the run.
    """

    def __init__(self, own: NoCheckpoints, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self.keeps = own.keeps

    def open(self, folder: Path, on_event: OnEvent, run: str | None = None, verify: Verify = verify) -> None:
        """Opens the checkpoints on rank 0; raises on all ranks if that fails. All ranks share each `verify`."""
        run_on_main(self._ranks, lambda: self._own.open(folder, on_event, run, self._verify_together))

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step` steps, which is the same on every rank."""
        return self._own.due(step)

    def save(self, step: int, tree: Tree, **about: Any) -> None:
        """Writes the whole state on rank 0, or the shards of a sharded state on every rank."""
        if not self.keeps:
            return
        if not any(map(is_sharded, flatten(tree)[0].values())):
            if self._ranks.is_main:
                self._own.save(step, tree, **about)
            return
        # The last write must have ended on all ranks before the next may use a folder.
        self.wait()
        patience = timeout().total_seconds() * SHARE
        writers = ShardWriters(self._ranks.rank, self._ranks.world_size, patience, self._ask)
        self._own.save(step, tree, **about, writers=writers)

    def wait(self) -> None:
        """Waits for the last write to end on every rank; if it raised on any rank, raises on all."""
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
        """Waits for this rank's last write only: the other ranks may be gone."""
        self._own.finish_quietly()

    def unsaved(self) -> str | None:
        """Returns rank 0's answer."""
        return self._ask(self._own.unsaved)

    def newest(self, *, healthy_only: bool = False, at_most: int | None = None) -> Checkpoint | None:
        """Returns rank 0's answer."""
        return self._found(lambda: self._own.newest(healthy_only=healthy_only, at_most=at_most))

    def oldest(self) -> Checkpoint | None:
        """Returns rank 0's answer."""
        return self._found(self._own.oldest)

    def reaches(self, step: int) -> bool:
        """Returns rank 0's answer."""
        return self._ask(lambda: self._own.reaches(step))

    def preferred(self) -> Checkpoint | None:
        """Returns rank 0's answer."""
        return self._found(self._own.preferred)

    def best(self) -> Checkpoint | None:
        """Returns rank 0's answer."""
        return self._found(self._own.best)

    def find(self, path: Path) -> Checkpoint:
        """Returns rank 0's answer."""
        found = self._found(lambda: self._own.find(path))
        assert found is not None, "find raises if there is none"
        return found

    def accept(self, found: Checkpoint, fault: str) -> bool:
        """Returns whether every rank could use a checkpoint's state."""
        first = next(filter(None, all_gather_object(fault)), "")
        return self._ask(lambda: self._own.accept(found, first))

    def rewind(self, step: int) -> None:
        """Deletes obsolete checkpoints, on rank 0."""
        self._ask(lambda: self._own.rewind(step))

    def _found(self, look: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        def path() -> Path | None:
            found = look()
            return None if found is None else found.path

        known = self._ask(path)
        return None if known is None else peek(known)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Returns rank 0's answer, or raises its exception, on every rank.

        While rank 0 looks for the answer, the other ranks do their share of each `_verify_together`.
        """
        if self._ranks.is_main:
            answer, raised = None, None
            try:
                answer = question()
            except Exception as error:  # if one rank raises, all must: another would wait forever
                raised = error
            broadcast_object((None, answer, raised))
        else:
            path, answer, raised = broadcast_object(None)
            while path is not None:  # a request from `_verify_together`, not the answer yet
                all_gather_object(self._fault(path))
                path, answer, raised = broadcast_object(None)
        if raised is not None:
            raise raised
        return answer

    def _verify_together(self, path: Path) -> Checkpoint:
        """Has every rank verify its share of a checkpoint. Runs on rank 0, within `_ask`.

        Raises:
            UnusableCheckpoint: a rank found damage.
        """
        found = peek(path)
        broadcast_object((path, None, None))
        for fault in all_gather_object(self._fault(path)):
            if fault:
                raise UnusableCheckpoint(fault)
        return found

    def _fault(self, path: Path) -> str:
        """Verifies this rank's share of a checkpoint. Returns what is wrong with it; empty if nothing is."""
        try:
            verify(path, self._ranks.rank, self._ranks.world_size)
        except UnusableCheckpoint as error:
            return str(error)
        return ""


def for_all_ranks(checkpoints: NoCheckpoints, ranks: Ranks) -> NoCheckpoints:
    """Returns `checkpoints`, wrapped if there are several ranks."""
    return SharedCheckpoints(checkpoints, ranks) if ranks.distributed else checkpoints
