"""Which checkpoints a folder holds, and which of them can be trusted: reading them needs no run."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from stabletrain.errors import ConfigError
from stabletrain.state.disk import MANIFEST, Checkpoint, UnusableCheckpoint, verify

NAME = re.compile(r"step-(\d{8,})")


def find(path: Path, *, best: bool = False) -> Checkpoint:
    """A checkpoint to read from, without a run: `path` itself, or the newest (or best) one in it that
    verifies.

    Args:
        path: a checkpoint, a folder of checkpoints, or a run folder.
        best: the healthy one of the lowest validation loss instead of the newest.

    Raises:
        ConfigError: there is none; names the folder and what is wrong with those that are there.
    """
    if (path / MANIFEST).exists():
        return verify(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found, reasons = [], []
    for step in reversed(list(steps_in(folder))):
        try:
            found.append(verified(step))
        except UnusableCheckpoint as error:
            reasons.append(str(error))
        if found and not best:
            return found[0]
    if best and (ranked := by_val_loss(found)):
        return ranked[0]
    kind = "checkpoint with a validation loss" if best else "checkpoint"
    why = "; ".join(reasons) or "name a run folder, its checkpoints folder, or one step-XXXXXXXX in it"
    raise ConfigError(f"{path} holds no usable {kind}: {why}")


def steps_in(folder: Path) -> Iterator[Path]:
    """The folders that are named like checkpoints, oldest first."""
    named = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    yield from sorted(named, key=number)


def number(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.partition("-")[2])


def verified(path: Path) -> Checkpoint:
    """The checkpoint at `path`, verified; its name must be its step's, as a renamed copy is none."""
    found = verify(path)
    if found.step != number(path):
        raise UnusableCheckpoint(f"{path}: its manifest is of step {found.step}")
    return found


def by_val_loss(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """The healthy ones with a finite validation loss, best first, of equals the newest."""
    ranked = [c for c in checkpoints if c.healthy and c.val_loss is not None and math.isfinite(c.val_loss)]
    return sorted(ranked, key=lambda c: (c.val_loss, -c.step))
