"""Writes checkpoints in the background, at the configured cadence.

The state is copied to the host at once; a background thread hashes and writes it. Training waits only if the previous
write is still running. A failed write costs that checkpoint, never the run. `folder.py` decides which checkpoints are
kept and which one a run continues from.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from stabletrain.checkpoint import sharded, writer
from stabletrain.checkpoint.folder import Folder, OnEvent, Verify, kept, reason_of, superseded
from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.checkpoint.reader import Checkpoint, verify
from stabletrain.checkpoint.sharded import RankShard
from stabletrain.checkpoint.tree import ShardWriters, Tree, flatten, to_host, unsharded
from stabletrain.checkpoint.writer import FileContent, FullState
from stabletrain.errors import ConfigError
from stabletrain.printable import warn


class Background:
    """Runs one task at a time: on a background thread if `asynchronous`, otherwise on the calling thread.

    Attributes:
        ending: set when the run is ending with an error; work under way should finish soon.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous, self.ending = asynchronous, threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None], name: str) -> None:
        """Starts `work`. The caller must have waited for the previous work."""

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
        """Waits for the work to end, and raises the exception it raised."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish_quietly(self) -> None:
        """Asks the work to end soon and waits for it. Raises nothing: the run is already ending with an error."""
        self.ending.set()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class Checkpoints(NoCheckpoints):
    """Writes and reads the checkpoints in `<run folder>/checkpoints`.

    Attributes:
        every: steps between two checkpoints.
        keep: number of newest checkpoints to keep, in addition to the last healthy ones.
        keep_best: whether to keep the healthy checkpoint with the lowest validation loss too.
        asynchronous: whether a background thread writes; False waits for each write.
        failed: number of failed writes in this process.
    """

    keeps = True

    def __init__(self, every: int, keep: int, keep_best: bool, asynchronous: bool) -> None:
        if every < 1:
            raise ConfigError(f"checkpoint.every={every} is below 1 step: choose 1 or more, or checkpoint=off")
        if keep < 1:
            raise ConfigError(f"checkpoint.keep={keep} is below 1: choose 1 or more, or checkpoint=off")
        self.every, self.keep, self.keep_best = every, keep, keep_best
        self.failed = 0
        self._folder: Folder | None = None
        self.asynchronous = asynchronous
        self._background = Background(asynchronous)
        self._begun = 0  # sharded checkpoints begun so far
        self._reason = ""  # why the last write failed; empty while writes succeed
        self._stuck: set[Path] = set()  # paths already reported as impossible to delete

    def open(self, folder: Path, on_event: OnEvent, run: str | None = None, verify: Verify = verify) -> None:
        """Sets the run folder, and deletes what a killed process left half-written."""
        super().open(folder, on_event, run, verify)
        self._folder = Folder(folder / "checkpoints", on_event, run, verify=verify)
        try:
            writer.try_out(self._folder.path)
            writer.tidy(self._folder.path)
        except OSError as error:
            raise ConfigError(
                f"no checkpoint can be written to {self._folder.path} ({reason_of(error)}): fix this, choose another "
                "hydra.run.dir, or train without checkpoints: checkpoint=off"
            ) from error

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step` steps."""
        return step > 0 and step % self.every == 0

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
        """Copies the state to the host, then writes it in the background. The last healthy checkpoint is kept."""
        self.wait()
        flatten({"info": info, "tree": tree})  # raise here, where the stack shows the caller
        if writers is None:
            content: FullState | RankShard = FullState(to_host(unsharded(tree)), self.write_file)
        else:
            temporary = writers.ask_main(lambda: self._begin(step))
            if temporary is None:  # reported already
                return
            content = RankShard(temporary, writers, tree, self._background.ending, self.write_file)
        about = {"step": step, "info": to_host(dict(info)), "healthy": healthy, "val_loss": val_loss}
        work = partial(self._attempt, step, content, about, anchors, here)
        # Rank 0 alone publishes a sharded checkpoint, reports it, and deletes old ones.
        if isinstance(content, RankShard) and content.writers.rank > 0:
            work = partial(write_shard, content, healthy)
        self._background.start(work, f"checkpoint-{step}")

    def wait(self) -> None:
        """Waits for the last write to end."""
        self._background.wait()

    def finish_quietly(self) -> None:
        """Waits for the last write to end. Raises nothing: the run is already ending with an error."""
        self._background.finish_quietly()

    def write_file(self, path: Path, content: FileContent) -> dict[str, Any]:
        """Writes and synchronizes a file of tensors; returns its manifest entry. A fault on purpose overrides this."""
        return writer.write_file(path, content)

    def unsaved(self) -> str | None:
        """Returns why the last state could not be written, and what is left on the disk; None if it was written."""
        if not self._reason:
            return None
        known = self._open_folder().known()
        left = f"the newest on the disk is of step {known[-1].step}" if known else "no checkpoint of this run is left"
        return f"the last state could not be saved ({self._reason}): {left}; writes that failed: {self.failed}"

    def newest(self, *, healthy_only: bool = False, at_most: int | None = None) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies; see `Folder.newest`."""
        return self._written().newest(healthy_only=healthy_only, at_most=at_most)

    def oldest(self) -> Checkpoint | None:
        """Returns the oldest healthy checkpoint that verifies."""
        return self._written().oldest()

    def reaches(self, step: int) -> bool:
        """Returns whether a checkpoint of `step` or an earlier step passes `reader.peek`."""
        return any(checkpoint.step <= step for checkpoint in self._written().known())

    def preferred(self) -> Checkpoint | None:
        """Returns the checkpoint to resume from; see `Folder.preferred`."""
        return self._written().preferred()

    def best(self) -> Checkpoint | None:
        """Returns the checkpoint with the lowest validation loss among the healthy ones that verify."""
        return self._written().best()

    def accept(self, found: Checkpoint, fault: str) -> bool:
        """Returns whether a checkpoint's state could be used; if not, `newest` and `preferred` skip it from now on."""
        if fault:
            self._open_folder().reject(found.path, fault)
        return super().accept(found, fault)

    def rewind(self, step: int) -> None:
        """Deletes the checkpoints after `step`, which a rollback made obsolete.

        If none at or before `step` is healthy, the newest healthy one after it is kept until another has been written.
        """
        folder = self._written()
        healthy = folder.newest(healthy_only=True, at_most=step, again=False)  # training waits for this
        if healthy is None:
            folder.newest(healthy_only=True, again=False)  # finds damaged ones, so that a sound one is kept
        self._forget(superseded(folder.known(), step, healthy is not None))

    def _begin(self, step: int) -> Path | None:
        """Creates the hidden folder for the shards of one checkpoint; reports a failure and returns None."""
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

    def _attempt(self, step: int, *arguments: Any) -> None:
        try:
            fields = self._write(step, *arguments)
        except OSError as error:  # other exceptions are bugs: `wait` raises them
            self._failed(step, error)
            return
        if self._reason:
            warn(f"checkpoints are written again, from step {step} on")
        self._reason = ""
        self._open_folder().report("checkpoint", step, fields)

    def _failed(self, step: int, error: OSError) -> None:
        self.failed += 1
        failing, self._reason = self._reason, reason_of(error)
        if not failing:  # report a full disk once, not at every checkpoint
            warn(
                f"the checkpoint of step {step} was not written ({self._reason}): training goes on, earlier "
                "checkpoints are kept"
            )
            self._open_folder().report("checkpoint_failed", step, {"reason": str(error)})

    def _write(
        self, step: int, content: FullState | RankShard, about: Mapping[str, Any], anchors: Sequence[int], here: bool
    ) -> dict:
        start, folder = time.perf_counter(), self._open_folder()
        there = os.path.isdir(folder.path)
        path, bad = content.publish(folder.path, about)
        healthy = about["healthy"] and bad is None
        self._say_if_gone(there, step)
        folder.damaged.pop(path, None)
        folder.mark_verified(path)
        # Delete old checkpoints only now that the new one is complete. An obsolete one that cannot be deleted is not
        # counted below: it would take the place of one to keep, such as the one just written.
        obsolete = superseded(folder.known(), step, healthy) if here else set()
        self._forget(obsolete)
        known = [checkpoint for checkpoint in folder.known() if checkpoint.path not in obsolete]
        # The state that the run is at stays, also if a later healthy one was spared and counts as the newest.
        stays = kept(known, self.keep, self.keep_best, anchors) | ({path} if here else set())
        self._forget({checkpoint.path for checkpoint in known} - stays)
        fields = {"path": path.name, "healthy": healthy, "seconds": round(time.perf_counter() - start, 3)}
        return fields if bad is None else {**fields, "reason": bad}

    def _say_if_gone(self, there: bool, step: int) -> None:
        if not there:
            folder = self._open_folder().path
            warn(f"{folder} was deleted with all its checkpoints: recreated it for the checkpoint of step {step}")

    def _forget(self, paths: set[Path]) -> None:
        for path in sorted(paths):
            try:
                writer.remove(path)
            except OSError as error:  # an extra checkpoint on disk is no reason to stop the run
                if path not in self._stuck:
                    self._stuck.add(path)
                    warn(f"{path} is no longer needed and cannot be deleted ({reason_of(error)}): please delete it")

    def _written(self) -> Folder:
        """Returns the folder after the last write has ended."""
        self.wait()
        return self._open_folder()

    def _open_folder(self) -> Folder:
        if self._folder is None:
            raise RuntimeError("Checkpoints.open(folder, on_event) comes first")
        return self._folder


def write_shard(part: RankShard, healthy: bool) -> None:
    """Writes the shards of a rank other than 0. Ignores I/O errors: rank 0 finds and reports them."""
    with suppress(OSError):
        part.write(healthy)
