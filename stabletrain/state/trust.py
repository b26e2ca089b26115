"""Reading a checkpoint without trusting it: it is what was written, byte for byte, or it is none.

A checkpoint is the folder that one process (`disk.py`) or several ranks (`assembly.py`) write; either is read whole, or
by each of several ranks as far as it needs it. Whatever else goes by its name, cut short, with one bit turned, not
readable, made by another program or by somebody who means harm, is refused with the file's name and the reason; and
no file is ever unpickled.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stabletrain.state.contents import (
    MANIFEST,
    MODEL,
    PIECE,
    SKELETON,
    TRAINING,
    WHOLE,
    label,
    names_in,
    parts_of,
    places_of_moments,
    tensors_in,
)
from stabletrain.state.intact import UnusableCheckpoint, check, checked, naming, size
from stabletrain.state.tree import Tree, unflatten

FORMAT, PARTED = (1, 2)
"""Numbers of the formats: a file for the model and one for all other tensors; two folders with a file of each rank."""

LARGEST_MANIFEST = 1 << 24
"""Bytes; a manifest of ours has some hundred, and is read whole before anything is known about it."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk.

    Attributes:
        path: its folder.
        step: steps done when it was taken.
        healthy: whether the caller judged it so, and its weights and moments are sound (`health.py`).
        val_loss: last validation loss known then, nats per target; None if there was none.
        info: what the caller wanted kept with it, plain JSON values.
    """

    path: Path
    step: int
    healthy: bool
    val_loss: float | None
    info: Mapping[str, Any]

    def load(self, places: Mapping[str, Tensor] | None = None) -> Tree:
        """The tree, on the CPU, every file of which is checked again; or what this rank needs of it, which is not.

        Args:
            places: by name the sharded tensors of the live model, if there are any. They and their moments are then
                read as they are sharded there, by each rank its own part of the files and no more; all else is whole.

        Raises:
            UnusableCheckpoint: a file is missing or is not what was written.
        """
        files = _manifest(self.path)["files"]
        skeleton = _skeleton(self.path, files)
        near = places_of_moments(self.path, skeleton["training"], places) if places else None
        training = tensors_in(self.path, "training", files, skeleton, near)
        return {"model": tensors_in(self.path, "model", files, skeleton, places or None), **training}

    def load_model(self) -> dict[str, Any]:
        """The model's `state_dict` alone, on the CPU; raises as `load` does."""
        files = _manifest(self.path)["files"]
        return tensors_in(self.path, "model", files, _skeleton(self.path, files), None)


def peek(path: Path) -> Checkpoint:
    """A checkpoint by its manifest and the sizes of its files, without reading the tensors.

    Raises:
        UnusableCheckpoint: it is none, was altered, or lacks bytes.
    """
    manifest = _manifest(path)
    for name, entry in manifest["files"].items():
        if (there := size(path, name)) != entry["bytes"]:
            raise UnusableCheckpoint(f"{path}: {name} has {there} bytes, the manifest says {entry['bytes']}")
    return _checkpoint(path, manifest)


def verify(path: Path, rank: int = 0, count: int = 1) -> Checkpoint:
    """A checkpoint of which every byte is what was written, and whose files fit together.

    Args:
        path: its folder.
        rank, count: of several processes that share the work each reads some of the files; only if none of them raises
            has all been verified.

    Raises:
        UnusableCheckpoint: it is not so; says which file and why.
    """
    if rank == 0:
        peek(path)
    manifest = _manifest(path)
    files = manifest["files"]
    for name in [name for name in files if name != SKELETON][rank::count]:
        check(path, name, files)
    if rank == 0:
        skeleton = _skeleton(path, files)
        for part in WHOLE:
            names = parts_of(part, files)
            with naming(path, label(part, names)):
                unflatten(skeleton[part], dict.fromkeys(names_in(path, part, names, skeleton)))
    return _checkpoint(path, manifest)


def render(manifest: Mapping[str, Any]) -> bytes:
    """The one way to write a manifest: its values and, last, their SHA-256."""
    return json.dumps({**manifest, "sha256": _digest(manifest)}, allow_nan=False, indent=2).encode()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, allow_nan=False, sort_keys=True).encode()).hexdigest()


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest's values; `val_loss` and `info` as they were given."""
    with naming(path, MANIFEST):
        if (there := size(path, MANIFEST)) > LARGEST_MANIFEST:
            raise UnusableCheckpoint(f"{path}: {MANIFEST} has {there} bytes, which is no manifest")
        content = (path / MANIFEST).read_bytes()
        manifest = json.loads(content)
        if (form := manifest["format"]) not in (FORMAT, PARTED):
            raise UnusableCheckpoint(
                f"{path}: {MANIFEST} is of format {form}; this version reads {FORMAT} and {PARTED}"
            )
        del manifest["sha256"]
        named = manifest["files"].keys() - {SKELETON}
        ours = all(map(PIECE.fullmatch, named)) if form == PARTED else named == {MODEL, TRAINING}
        if content != render(manifest) or not ours or SKELETON not in manifest["files"]:
            raise UnusableCheckpoint(f"{path}: {MANIFEST} does not match its checksum")
        given = unflatten({"val_loss": manifest["val_loss"], "info": manifest["info"]}, {})
        manifest |= given
        kinds = {"step": int, "healthy": bool, "val_loss": int | float | None, "info": dict}
        sound = all(isinstance(manifest[key], kind) for key, kind in kinds.items())
        if not sound or not all(isinstance(entry["bytes"], int) for entry in manifest["files"].values()):
            raise TypeError
        return manifest


def _skeleton(path: Path, files: Mapping[str, Any]) -> dict[str, Tree]:
    """What `state.json` says of both parts, and of the shapes of tensors that are in pieces."""
    content = checked(path, SKELETON, files)
    with naming(path, SKELETON):
        skeleton = json.loads(content)
        return {part: dict(skeleton[part]) for part in (*WHOLE, *(() if MODEL in files else ("shapes",)))}


def _checkpoint(path: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(path, manifest["step"], manifest["healthy"], manifest["val_loss"], manifest["info"])
