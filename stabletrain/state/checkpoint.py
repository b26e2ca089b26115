"""When checkpoints are written, which are kept, and which one a run continues from.

The copy to the host is taken at once; hashing, writing and synchronising happen on a background thread, so training
waits only if the write before has not ended. A write that fails costs that checkpoint, never the run.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stabletrain.errors import ConfigError
from stabletrain.state import disk
from stabletrain.state.disk import Checkpoint, UnusableCheckpoint
from stabletrain.state.folder import by_val_loss, number, steps_in, verified
from stabletrain.state.tree import Tree, flatten, to_host

Report = Callable[[str, int, dict], None]
"""Takes an event's kind, its step and its fields; called from the writing thread too."""


class NoCheckpoints:
    """Keeps nothing on disk and continues from nothing.

    Attributes:
        keeps: whether anything is ever saved.
    """

    keeps = False

    def open(self, folder: Path, on_event: Report) -> None:
        """Nothing to open."""

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def save(self, step: int, tree: Tree, *, info: Mapping[str, Any], healthy: bool, val_loss: float | None) -> None:
        """Nothing is saved."""

    def wait(self) -> None:
        """Nothing is under way."""

    def settle(self) -> None:
        """Nothing is under way."""

    def newest(self, *, healthy_only: bool = False) -> Checkpoint | None:
        """None."""
        return None

    def best(self) -> Checkpoint | None:
        """None."""
        return None

    def rewind(self, step: int) -> None:
        """Nothing to forget."""


class Checkpoints(NoCheckpoints):
    """Checkpoints in `<run folder>/checkpoints`.

    Two moments make one: the configuration gives the policy, `open` the folder, since a run's folder is known
    only when it starts, and reading (`find`) needs neither.

    Attributes:
        every: steps between two checkpoints.
        keep: so many of the newest are kept, besides the last healthy one, which is never removed.
        keep_best: also keep the healthy one of the lowest validation loss.
        asynchronous: write on a background thread; False waits for each write.
    """

    keeps = True

    def __init__(self, every: int, keep: int, keep_best: bool, asynchronous: bool) -> None:
        if every < 1:
            raise ConfigError(f"checkpoint.every={every} is below 1 step: choose 1 or more, or checkpoint=off")
        if keep < 1:
            raise ConfigError(f"checkpoint.keep={keep} is below 1: choose 1 or more, or checkpoint=off")
        self.every, self.keep, self.keep_best, self.asynchronous = every, keep, keep_best, asynchronous
        self._folder: Path | None = None
        self._on_event: Report | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failing = False

    def open(self, folder: Path, on_event: Report) -> None:
        """Chooses the run folder, and clears away what a killed process left half-written.

        Args:
            folder: the run folder; made if it does not exist.
            on_event: is told `checkpoint`, `checkpoint_failed` and `checkpoint_skipped`; from the writing
                thread too.
        """
        self._folder = folder / "checkpoints"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._on_event = on_event
        disk.tidy(self._folder)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be taken when `step` steps are done."""
        return step > 0 and step % self.every == 0

    def save(self, step: int, tree: Tree, *, info: Mapping[str, Any], healthy: bool, val_loss: float | None) -> None:
        """Copies the state to the host, then writes it in the background.

        Args:
            step: steps done; one of that number is replaced.
            tree: from `capture`; may share memory with the live state, which may change as soon as this
                returns.
            info: plain JSON values kept with it.
            healthy: the caller's judgement; weights or moments that are not finite overrule it.
            val_loss: nats per target; None if not known.

        Raises:
            TypeError: the tree or `info` holds something that needs pickle.
        """
        self.wait()
        flatten({"info": info, "tree": tree})  # what cannot be written is refused here, where its stack tells
        arguments = (step, to_host(tree), to_host(dict(info)), healthy, val_loss)
        if self.asynchronous:
            self._thread = threading.Thread(target=self._attempt, args=arguments, name=f"checkpoint-{step}")
            self._thread.start()
        else:
            self._attempt(*arguments)
            self.wait()

    def wait(self) -> None:
        """Returns when the last write has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Returns when the last write has ended; for a run that is ending with an error of its own already."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def newest(self, *, healthy_only: bool = False) -> Checkpoint | None:
        """The newest checkpoint that verifies; others are reported with their reason and passed over."""
        self.wait()
        for path in reversed(list(steps_in(self._open_folder()))):
            found = self._verified(path)
            if found is not None and (found.healthy or not healthy_only):
                return found
        return None

    def best(self) -> Checkpoint | None:
        """The healthy checkpoint of the lowest validation loss that verifies."""
        self.wait()
        for known in by_val_loss(self._known()):
            if self._verified(known.path) is not None:
                return known
        return None

    def rewind(self, step: int) -> None:
        """Forgets the checkpoints after `step`, which a rollback left behind; never the last healthy one."""
        self.wait()
        known = self._known()
        healthy = [c for c in known if c.healthy]
        last = next((c for c in reversed(healthy) if c.step <= step), healthy[-1] if healthy else None)
        for checkpoint in known:
            if checkpoint.step > step and checkpoint is not last:
                disk.remove(checkpoint.path)

    def _attempt(self, step: int, *arguments: Any) -> None:
        try:
            self._tell("checkpoint", step, self._write(step, *arguments))
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._failing = True
                reason = error.strerror or str(error)
                say(
                    f"the checkpoint of step {step} was not written ({reason}): training goes on, earlier "
                    "checkpoints are kept"
                )
                self._tell("checkpoint_failed", step, {"reason": str(error)})
        except BaseException as error:  # of the program, not the disk: raised where the loop waits
            self._error = error

    def _write(self, step: int, tree: Tree, info: Mapping[str, Any], healthy: bool, val_loss: float | None) -> dict:
        start = time.perf_counter()
        bad = nonfinite(tree) if healthy else None
        path = disk.write(
            self._open_folder(),
            tree,
            step=step,
            info=info,
            healthy=healthy and bad is None,
            val_loss=val_loss,
        )
        self._retain()
        fields = {
            "path": path.name,
            "healthy": healthy and bad is None,
            "seconds": round(time.perf_counter() - start, 3),
        }
        return fields if bad is None else {**fields, "reason": f"{bad} is not finite"}

    def _retain(self) -> None:
        known = self._known()
        kept = {c.path for c in known[-self.keep :]}
        kept |= {c.path for c in [c for c in known if c.healthy][-1:]}
        if self.keep_best:
            kept |= {c.path for c in by_val_loss(known)[:1]}
        for checkpoint in known:
            if checkpoint.path not in kept:
                disk.remove(checkpoint.path)

    def _known(self) -> list[Checkpoint]:
        """All that look whole, oldest first. Those that do not are left for people to look at."""
        known = []
        for path in steps_in(self._open_folder()):
            try:
                known.append(disk.peek(path))
            except UnusableCheckpoint:
                continue
        return known

    def _verified(self, path: Path) -> Checkpoint | None:
        try:
            return verified(path)
        except UnusableCheckpoint as error:
            say(f"checkpoint skipped: {error}")
            self._tell("checkpoint_skipped", number(path), {"path": path.name, "reason": str(error)})
            return None

    def _tell(self, kind: str, step: int, fields: dict) -> None:
        if self._on_event is not None:
            self._on_event(kind, step, fields)

    def _open_folder(self) -> Path:
        if self._folder is None:
            raise RuntimeError("Checkpoints.open(folder, on_event) comes first")
        return self._folder


def nonfinite(tree: Tree) -> str | None:
    """Name of the first tensor among weights, buffers and optimizer state that holds NaN or Inf."""
    judged = {"model": tree["model"], "optimizer": tree.get("optimizer", {}).get("state", {})}
    for name, tensor in flatten(judged)[0].items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name.removeprefix("model/")
    return None


def say(message: str) -> None:
    """One line for people."""
    print(f"stabletrain: {message}", file=sys.stderr)
