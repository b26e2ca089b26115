"""Writes checkpoints in the background, at the configured cadence.

One piece of work at a time on a thread of its own; what goes wrong in it is raised where it is waited for.

When checkpoints are written, and what becomes of a run whose disk does not take them.

The copy to the host is taken at once; hashing, writing and synchronising happen on a background thread, so training
waits only if the write before has not ended. A write that fails costs that checkpoint, never the run: it is said once,
the next one is tried in its turn, and once more it is said when that succeeds. Which checkpoints stay is in
`folder.py`, and so does which one a run continues from.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from stabletrain.checkpoint import sharded, writer
from stabletrain.checkpoint.folder import Folder, OnEvent, find, kept, reason_of, superseded, warn
from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.checkpoint.sharded import RankShard
from stabletrain.checkpoint.tree import ShardTarget, Tree, flatten, to_host
from stabletrain.checkpoint.writer import FullState
from stabletrain.errors import ConfigError


class Background:
    """A thread, or none.

    Args:
        asynchronous: False does all work at once.

    Attributes:
        ending: set when nobody will ask for the work any more.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous, self.ending = asynchronous, threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None], name: str) -> None:
        """Does `work`; the work before has been waited for."""

        def attempt() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        if self.asynchronous:
            self._thread = threading.Thread(target=attempt, name=name)
            self._thread.start()
        else:
            attempt()
            self.wait()

    def wait(self) -> None:
        """Returns when the work has ended; raises what it raised."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish_quietly(self) -> None:
        """Returns when the work has ended, soon; for a run that is ending with an error of its own already."""
        self.ending.set()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class Checkpoints(NoCheckpoints):
    """Checkpoints in `<run folder>/checkpoints`.

    Two moments make one: the configuration gives the policy, `open` the folder, since a run's folder is known
    only when it starts, and reading (`find`) needs neither.

    Attributes:
        every: steps between two checkpoints.
        keep: so many of the newest are kept, besides the last healthy ones.
        keep_best: also keep the healthy one of the lowest validation loss.
    Args:
        asynchronous: write on a background thread; False waits for each write.
    """

    keeps = True

    def __init__(self, every: int, keep: int, keep_best: bool, asynchronous: bool) -> None:
        if every < 1:
            raise ConfigError(f"checkpoint.every={every} is below 1 step: choose 1 or more, or checkpoint=off")
        if keep < 1:
            raise ConfigError(f"checkpoint.keep={keep} is below 1: choose 1 or more, or checkpoint=off")
        self.every, self.keep, self.keep_best = every, keep, keep_best
        self._folder: Folder | None = None
        self._on_event: OnEvent | None = None
        self.asynchronous = asynchronous
        self._background = Background(asynchronous)
        self._begun = 0  # checkpoints of several ranks that were begun
        self._reason = ""  # why the last write failed; empty while writes succeed
        self._written: int | None = None  # step of the last one that succeeded
        self._stuck: set[Path] = set()  # said to be in the way

    def open(self, folder: Path, on_event: OnEvent, run: str | None = None) -> None:
        """Chooses the run folder, and clears away what a killed process left half-written.

        Args:
            folder: the run folder; made if it does not exist.
            on_event: is told `checkpoint`, `checkpoint_failed` and `checkpoint_skipped`; from the writing
                thread too.
            run: the run's id: checkpoints whose `info["run"]` is another are not continued from.

        Raises:
            ConfigError: no checkpoint can be written there.
        """
        self._folder, self._on_event = Folder(folder / "checkpoints", on_event, run, verify=self.verify), on_event

        try:
            writer.try_out(self._folder.path)
            writer.tidy(self._folder.path)
        except OSError as error:
            raise ConfigError(
                f"no checkpoint can be written to {self._folder.path} ({reason_of(error)}): fix that, choose another "
                "hydra.run.dir, or train without, by checkpoint=off"
            ) from error

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be taken when `step` steps are done."""
        return step > 0 and step % self.every == 0

    def begin(self, step: int) -> Path | None:
        """Makes the folder in which several ranks write a checkpoint; None where that fails, which is said."""
        self._begun += 1
        folder = self._open_folder().path
        there = os.path.isdir(folder)
        try:
            made = sharded.begin(folder, step, self._begun)
        except OSError as error:
            self._failed(step, error)
            return None
        self._say_if_gone(there, step)
        return made

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
        """Copies the state to the host, then writes it in the background.

        What is on the disk of later steps is then left behind by the run, and goes, unless it is the last healthy one.

        Args:
            step: steps done; one of that number is replaced.
            tree: from `capture`; may share memory with the live state, which may change as soon as this
                returns.
            info: plain JSON values kept with it.
            healthy: the caller's judgement; weights or moments that are not sound (`writer.py`) overrule it.
            val_loss: nats per target; None if not known.
            anchor: the newest checkpoint of a step up to this one stays, whatever its age.
            here: whether the run is at that step now; False for an older state, which leaves nothing behind.
            place: where the ranks of a sharded state write their parts of it, each by a call of its own; None for a
                state that is written by this process alone.

        Raises:
            TypeError: the tree or `info` holds something that needs pickle.
        """
        self.wait()
        flatten({"info": info, "tree": tree})  # what cannot be written is refused here, where its stack tells
        content = FullState(to_host(tree)) if place is None else RankShard(place, tree, self._background.ending)
        work = partial(self._attempt, step, content, to_host(dict(info)), healthy, val_loss, anchor, here)
        if isinstance(content, RankShard) and content.place.rank > 0:
            work = partial(write_shard, content, healthy)
        self._background.start(work, f"checkpoint-{step}")

    def wait(self) -> None:
        """Returns when the last write has ended."""
        self._background.wait()

    def finish_quietly(self) -> None:
        """Returns when the last write has ended; for a run that is ending with an error of its own already."""
        self._background.finish_quietly()

    def saved(self, step: int) -> bool:
        """Whether the newest write that ended was of `step`, and succeeded."""
        return self._written == step and not self._reason

    def unsaved(self) -> str | None:
        """One line for the end of a run whose last state could not be written; None if it could."""
        if not self._reason:
            return None
        known = self._open_folder().known()
        left = f"the newest on the disk is of step {known[-1].step}" if known else "no checkpoint of this run is left"
        return f"the last state could not be saved ({self._reason}): {left}; writes that failed: {self.failed}"

    def newest(self, *, healthy_only: bool = False, at_most: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that verifies, of at most that step; see `Folder.newest`."""
        self.wait()
        return self._open_folder().newest(healthy_only=healthy_only, at_most=at_most)

    def oldest(self) -> Checkpoint | None:
        """The oldest healthy checkpoint that verifies."""
        self.wait()
        return self._open_folder().oldest()

    def reaches(self, step: int) -> bool:
        """Whether a checkpoint of that step or an earlier one looks whole."""
        self.wait()
        return any(checkpoint.step <= step for checkpoint in self._open_folder().known())

    def preferred(self) -> Checkpoint | None:
        """What a run continues from: the newest that verifies, or an older one that is healthy; see
        `Folder.preferred`."""
        self.wait()
        return self._open_folder().preferred()

    def best(self) -> Checkpoint | None:
        """The healthy checkpoint of the lowest validation loss that verifies."""
        self.wait()
        return self._open_folder().best()

    def find(self, path: Path) -> Checkpoint:
        """A checkpoint of any run; see `folder.find`."""
        return find(path, verify=self.verify)

    def rewind(self, step: int) -> None:
        """Forgets the checkpoints after `step`, which a rollback left behind.

        The last healthy one that verifies is never among them: where none at or before `step` does, the newest after
        it stays until a healthy one has been written.
        """
        self.wait()
        folder = self._open_folder()
        healthy = folder.newest(healthy_only=True, at_most=step, again=False)  # training waits for this
        if healthy is None:
            folder.newest(healthy_only=True, again=False)  # so that one found damaged is not the one that stays
        self._forget(superseded(folder.known(), step, healthy is not None))

    def _attempt(self, step: int, *arguments: Any) -> None:
        try:
            fields = self._write(step, *arguments)
        except OSError as error:  # any other is of the program, and raised where the loop waits
            self._failed(step, error)
        else:
            self._succeeded(step, fields)

    def _failed(self, step: int, error: OSError) -> None:
        self.failed += 1
        failing, self._reason = self._reason, reason_of(error)
        if not failing:
            warn(
                f"the checkpoint of step {step} was not written ({self._reason}): training goes on, earlier "
                "checkpoints are kept"
            )
            self._tell("checkpoint_failed", step, {"reason": str(error)})

    def _succeeded(self, step: int, fields: dict) -> None:
        if self._reason:
            warn(f"checkpoints are written again, from step {step} on")
        self._written, self._reason = step, ""
        self._tell("checkpoint", step, fields)

    def _write(
        self,
        step: int,
        content: FullState | RankShard,
        info: Mapping[str, Any],
        healthy: bool,
        val_loss: float | None,
        anchor: int | None,
        here: bool,
    ) -> dict:
        start, folder = time.perf_counter(), self._open_folder()
        there = os.path.isdir(folder.path)
        path, bad = content.publish(folder.path, step=step, info=info, healthy=healthy, val_loss=val_loss)
        healthy = healthy and bad is None
        self._say_if_gone(there, step)
        folder.damaged.pop(path, None)
        folder.mark_verified(path)
        if here:
            self._forget(superseded(folder.known(), step, healthy))
        known = folder.known()
        self._forget({checkpoint.path for checkpoint in known} - kept(known, self.keep, self.keep_best, anchor))
        fields = {"path": path.name, "healthy": healthy, "seconds": round(time.perf_counter() - start, 3)}
        return fields if bad is None else {**fields, "reason": bad}

    def _say_if_gone(self, there: bool, step: int) -> None:
        if not there:
            folder = self._open_folder().path
            warn(f"{folder} had gone with all that was in it: it is made again, with the checkpoint of step {step}")

    def _forget(self, paths: set[Path]) -> None:
        for path in sorted(paths):
            try:
                writer.remove(path)
            except OSError as error:  # one too many on the disk is no reason to stop
                if path not in self._stuck:
                    self._stuck.add(path)
                    warn(f"{path} is of no more use and cannot be removed ({reason_of(error)}): please remove it")

    def _tell(self, kind: str, step: int, fields: dict) -> None:
        if self._on_event is not None:
            self._on_event(kind, step, fields)

    def _open_folder(self) -> Folder:
        if self._folder is None:
            raise RuntimeError("Checkpoints.open(folder, on_event) comes first")
        return self._folder


def write_shard(part: RankShard, healthy: bool) -> None:
    """Writes the part of a rank that is not the first; where the disk does not take it, rank 0 hears of it."""
    with suppress(OSError):
        part.write(healthy)
