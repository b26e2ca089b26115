"""Reading a checkpoint without trusting it: it is what was written, byte for byte, or it is none.

A checkpoint is the folder that `disk.py` writes. Whatever else goes by its name, cut short, with one bit turned, not
readable, made by another program or by somebody who means harm, is refused with the file's name and the reason; and
no file is ever unpickled.
"""

import hashlib
import json
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open

from stabletrain.errors import ConfigError
from stabletrain.state.tree import Tree, unflatten

FORMAT = 1
MODEL, TRAINING, SKELETON, MANIFEST = ("model.safetensors", "training.safetensors", "state.json", "manifest.json")
CHUNK = 1 << 20
LARGEST_MANIFEST = 1 << 24
"""Bytes; a manifest of ours has some hundred, and is read whole before anything is known about it."""


class UnusableCheckpoint(ConfigError):
    """A folder that is no checkpoint, or no longer the one that was written; says which file and why."""


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

    def load(self) -> Tree:
        """The whole tree, on the CPU.

        Raises:
            UnusableCheckpoint: a file is missing or is not what was written.
        """
        files = _manifest(self.path)["files"]
        skeleton = _skeleton(self.path, files)
        training = _tensors(self.path, TRAINING, files, skeleton["training"])
        return {"model": _tensors(self.path, MODEL, files, skeleton["model"]), **training}

    def load_model(self) -> dict[str, Any]:
        """The model's `state_dict` alone, on the CPU; raises as `load` does."""
        files = _manifest(self.path)["files"]
        return _tensors(self.path, MODEL, files, _skeleton(self.path, files)["model"])


def peek(path: Path) -> Checkpoint:
    """A checkpoint by its manifest and the sizes of its files, without reading the tensors.

    Raises:
        UnusableCheckpoint: it is none, was altered, or lacks bytes.
    """
    manifest = _manifest(path)
    for name, entry in manifest["files"].items():
        if (size := _size(path, name)) != entry["bytes"]:
            raise UnusableCheckpoint(f"{path}: {name} has {size} bytes, the manifest says {entry['bytes']}")
    return Checkpoint(path, manifest["step"], manifest["healthy"], manifest["val_loss"], manifest["info"])


def verify(path: Path) -> Checkpoint:
    """A checkpoint of which every byte is what was written, and whose files fit together.

    Raises:
        UnusableCheckpoint: it is not so; says which file and why.
    """
    found, files = peek(path), _manifest(path)["files"]
    for name in (MODEL, TRAINING):
        digest = hashlib.sha256()
        with _naming(path, name), open(path / name, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        _compare(path, name, files, digest.hexdigest())
    skeleton = _skeleton(path, files)
    for name, part in ((MODEL, "model"), (TRAINING, "training")):
        with _naming(path, name), safe_open(path / name, framework="pt") as tensors:
            unflatten(skeleton[part], dict.fromkeys(tensors.keys()))
    return found


def render(manifest: Mapping[str, Any]) -> bytes:
    """The one way to write a manifest: its values and, last, their SHA-256."""
    return json.dumps({**manifest, "sha256": _digest(manifest)}, allow_nan=False, indent=2).encode()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, allow_nan=False, sort_keys=True).encode()).hexdigest()


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest's values; `val_loss` and `info` as they were given."""
    with _naming(path, MANIFEST):
        if (size := _size(path, MANIFEST)) > LARGEST_MANIFEST:
            raise UnusableCheckpoint(f"{path}: {MANIFEST} has {size} bytes, which is no manifest")
        content = (path / MANIFEST).read_bytes()
        manifest = json.loads(content)
        if manifest["format"] != FORMAT:
            raise UnusableCheckpoint(
                f"{path}: {MANIFEST} is of format {manifest['format']}; this version reads {FORMAT}"
            )
        del manifest["sha256"]
        if content != render(manifest) or manifest["files"].keys() != {MODEL, TRAINING, SKELETON}:
            raise UnusableCheckpoint(f"{path}: {MANIFEST} does not match its checksum")
        given = unflatten({"val_loss": manifest["val_loss"], "info": manifest["info"]}, {})
        manifest |= given
        kinds = {"step": int, "healthy": bool, "val_loss": int | float | None, "info": dict}
        sound = all(isinstance(manifest[key], kind) for key, kind in kinds.items())
        if not sound or not all(isinstance(entry["bytes"], int) for entry in manifest["files"].values()):
            raise TypeError
        return manifest


def _skeleton(path: Path, files: Mapping[str, Any]) -> dict[str, Tree]:
    """What `state.json` says of both parts."""
    content = _checked(path, SKELETON, files)
    with _naming(path, SKELETON):
        skeleton = json.loads(content)
        return {part: dict(skeleton[part]) for part in ("model", "training")}


def _tensors(path: Path, name: str, files: Mapping[str, Any], skeleton: Tree) -> dict[str, Any]:
    """The part of the tree whose tensors are in the file `name`."""
    content = _checked(path, name, files)
    with _naming(path, name):
        return unflatten(skeleton, safetensors.torch.load(content))


def _checked(path: Path, name: str, files: Mapping[str, Any]) -> bytes:
    """A file's bytes, which are those that were written."""
    with _naming(path, name):
        content = (path / name).read_bytes()
    _compare(path, name, files, hashlib.sha256(content).hexdigest())
    return content


def _compare(path: Path, name: str, files: Mapping[str, Any], digest: str) -> None:
    if digest != files[name]["sha256"]:
        raise UnusableCheckpoint(f"{path}: {name} does not match its checksum")


def _size(path: Path, name: str) -> int:
    """Bytes of a plain file: a pipe or a device in its place could keep its reader for ever."""
    with _naming(path, name):
        status = (path / name).stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnusableCheckpoint(f"{path}: {name} is no file")
        return status.st_size


@contextmanager
def _naming(path: Path, name: str) -> Generator[None, None, None]:
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
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UnusableCheckpoint(f"{path}: {name} does not hold what it should ({type(error).__name__})") from error
