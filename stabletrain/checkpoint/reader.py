"""Reads a checkpoint, or refuses it: every byte is verified, and nothing is unpickled.

A file of a checkpoint, which is what was written, or is refused with its name and the reason.

Which files of a checkpoint hold what, and its tensors taken out of them: whole, or as far as a rank needs them.

Reading a checkpoint without trusting it: it is what was written, byte for byte, or it is none.

A checkpoint is the folder that one process (`writer.py`) or several ranks (`sharded.py`) write; either is read whole,
or by each of several ranks as far as it needs it. Whatever else goes by its name, cut short, with one bit turned, not
readable, made by another program or by somebody who means harm, is refused with the file's name and the reason; and no
file is ever unpickled.
"""

import hashlib
import json
import re
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stabletrain.checkpoint.tree import Tree, unflatten
from stabletrain.errors import ConfigError

CHUNK = 1 << 20


class UnusableCheckpoint(ConfigError):
    """A folder that is no checkpoint, or no longer the one that was written; says which file and why."""


def checked(path: Path, name: str, files: Mapping[str, Any]) -> bytes:
    """A file's bytes, which are those that were written."""
    with naming(path, name):
        content = (path / name).read_bytes()
    compare(path, name, files, hashlib.sha256(content).hexdigest())
    return content


def check(path: Path, name: str, files: Mapping[str, Any]) -> None:
    """Reads a file through, whose bytes must be those that were written."""
    size(path, name)  # no pipe, that is
    digest = hashlib.sha256()
    with naming(path, name), open(path / name, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    compare(path, name, files, digest.hexdigest())


def compare(path: Path, name: str, files: Mapping[str, Any], digest: str) -> None:
    if digest != files[name]["sha256"]:
        raise UnusableCheckpoint(f"{path}: {name} does not match its checksum")


def size(path: Path, name: str) -> int:
    """Bytes of a plain file: a pipe or a device in its place could keep its reader for ever."""
    with naming(path, name):
        status = (path / name).stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnusableCheckpoint(f"{path}: {name} is no file")
        return status.st_size


@contextmanager
def naming(path: Path, name: str) -> Generator[None, None, None]:
    """Whatever goes wrong in reading a file says that this is no checkpoint, and names the file: its content is
    anybody's."""
    try:
        yield
    except FileNotFoundError as error:
        raise UnusableCheckpoint(f"{path}: {name} is missing") from error
    except NotADirectoryError as error:
        raise UnusableCheckpoint(f"{path} is a file, not a folder") from error
    except OSError as error:
        raise UnusableCheckpoint(f"{path}: {name} cannot be read ({error.strerror or error})") from error
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise UnusableCheckpoint(f"{path}: {name} does not hold what it should ({type(error).__name__})") from error


MODEL, TRAINING, SKELETON, MANIFEST = ("model.safetensors", "training.safetensors", "state.json", "manifest.json")

WHOLE = {"model": MODEL, "training": TRAINING}
"""The file of each part, where one process has written it."""

PIECE = re.compile(r"(model|training)/shard-[0-9]{5,}-model-00001-of-00001\.safetensors")
"""The files of each part, where several ranks have; DCP's names."""


def parts_of(part: str, files: Mapping[str, Any]) -> list[str]:
    """The names of the files of `model` or of `training`, in order."""
    return sorted(name for name in files if name == WHOLE[part] or name.startswith(f"{part}/"))


def tensors_in(
    path: Path, part: str, files: Mapping[str, Any], skeleton: Mapping[str, Tree], places: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """A part of the tree; with `places`, of which the names are those in the files, what this rank needs of it."""
    names = parts_of(part, files)
    if places is None and names == [WHOLE[part]]:
        content = checked(path, names[0], files)
        with naming(path, names[0]):
            return unflatten(skeleton[part], safetensors.torch.load(content))
    from stabletrain.checkpoint import dcp

    for name in names if places is None else ():
        check(path, name, files)
    with naming(path, label(part, names)):
        tensors = dcp.read([path / name for name in names], shapes_of(part, skeleton), places or {})
        return unflatten(skeleton[part], tensors)


def places_of_moments(path: Path, skeleton: Tree, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The places of what an optimizer keeps of sharded parameters: the parameters'; by the names in the files."""
    with naming(path, SKELETON):
        moments = _named(skeleton["optimizer"]["state"]) if "optimizer" in skeleton else {}
        return {
            name: places[parameter]
            for parameter, kinds in moments.items()
            if parameter in places
            for name in kinds.values()
            if isinstance(name, _Name)
        }


class _Name(str):
    """A tensor's name, in its place in the tree."""


def _named(skeleton: Tree) -> Tree:
    """The tree with the name of every tensor in its place."""

    class Itself(dict):
        def __missing__(self, name: str) -> _Name:
            return _Name(name)

    return unflatten(skeleton, Itself())


def names_in(path: Path, part: str, names: Sequence[str], skeleton: Mapping[str, Tree]) -> list[str]:
    """The names of the tensors in the files of one part, of which the pieces are all there."""
    if names == [WHOLE[part]]:
        with safe_open(path / names[0], framework="pt") as tensors:
            return list(tensors.keys())
    from stabletrain.checkpoint import dcp

    return list(dcp.opened([path / name for name in names], shapes_of(part, skeleton))[1]) if names else []


def shapes_of(part: str, skeleton: Mapping[str, Tree]) -> Mapping[str, Sequence[int]] | None:
    """The shapes of all tensors of a part that several ranks have written."""
    return dict(skeleton["shapes"][part]) if "shapes" in skeleton else None


def label(part: str, names: Sequence[str]) -> str:
    """What a message calls the files of a part."""
    return names[0] if names == [WHOLE[part]] else f"{part}/"


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
        healthy: whether the caller judged it so, and its weights and moments are sound (`writer.py`).
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
