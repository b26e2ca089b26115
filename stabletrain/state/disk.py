"""One checkpoint on disk: a folder that is complete or absent at every instant, and that nobody needs pickle
to read.

`step-00000500/` holds `model.safetensors` (the names of `model.state_dict()`, for any program),
`training.safetensors` (all other tensors), `state.json` (the skeletons of `state/tree.py`) and
`manifest.json` (sizes and SHA-256 of the other three, and of itself). It is written under a hidden temporary
name, each file and the folder are synchronised to the disk, and one rename makes it appear. Reading checks
every byte first, and no file is ever unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open

from stabletrain.errors import ConfigError
from stabletrain.state.stream import pieces
from stabletrain.state.tree import Tree, flatten, unflatten

FORMAT = 1
MODEL, TRAINING, SKELETON, MANIFEST = (
    "model.safetensors",
    "training.safetensors",
    "state.json",
    "manifest.json",
)
CHUNK = 1 << 20


class UnusableCheckpoint(ConfigError):
    """A folder that is no checkpoint, or no longer the one that was written; says which file and why."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk.

    Attributes:
        path: its folder.
        step: steps done when it was taken.
        healthy: whether the caller judged it so and all its weights and moments are finite.
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
        with _trusting_nothing(self.path):
            files, skeleton = self._open()
            training = safetensors.torch.load(_checked(self.path, TRAINING, files))
            model = safetensors.torch.load(_checked(self.path, MODEL, files))
            return {"model": unflatten(skeleton["model"], model), **unflatten(skeleton["training"], training)}

    def load_model(self) -> dict[str, Any]:
        """The model's `state_dict` alone, on the CPU; raises as `load` does."""
        with _trusting_nothing(self.path):
            files, skeleton = self._open()
            model = safetensors.torch.load(_checked(self.path, MODEL, files))
            return unflatten(skeleton["model"], model)

    def _open(self) -> tuple[dict[str, Any], Tree]:
        files = _manifest(self.path)["files"]
        return files, json.loads(_checked(self.path, SKELETON, files))


def write(
    folder: Path, tree: Tree, *, step: int, info: Mapping[str, Any], healthy: bool, val_loss: float | None
) -> Path:
    """Writes `folder/step-XXXXXXXX` and returns it; one of that name is replaced.

    Args:
        folder: the folder of checkpoints, which exists.
        tree: contiguous CPU tensors that nobody changes meanwhile, with a `model` at its top.

    Raises:
        OSError: the disk is full or gone; nothing half-written is left under a checkpoint's name.
    """
    model, model_skeleton = flatten(tree["model"])
    training, training_skeleton = flatten({key: child for key, child in tree.items() if key != "model"})
    skeleton = {"model": model_skeleton, "training": training_skeleton}
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "healthy": healthy}
    manifest |= flatten({"val_loss": val_loss, "info": info})[1]

    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.tmp-{os.getpid()}"
    old = folder / f".{final.name}.old-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        manifest["files"] = {
            MODEL: _write(temporary / MODEL, pieces(model)),
            TRAINING: _write(temporary / TRAINING, pieces(training)),
            SKELETON: _write(temporary / SKELETON, [_json(skeleton)]),
        }
        _write(temporary / MANIFEST, [_json(manifest | {"sha256": _digest(manifest)}, indent=2)])
        _sync(temporary)
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        _sync(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if old.exists() and not final.exists():
            old.rename(final)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def peek(path: Path) -> Checkpoint:
    """A checkpoint by its manifest and the sizes of its files, without reading the tensors.

    Raises:
        UnusableCheckpoint: it is none, was altered, or lacks bytes.
    """
    with _trusting_nothing(path):
        manifest = _manifest(path)
        for name, entry in manifest["files"].items():
            size = (path / name).stat().st_size if (path / name).is_file() else None
            if size is None:
                raise UnusableCheckpoint(f"{path}: {name} is missing")
            if size != entry["bytes"]:
                raise UnusableCheckpoint(f"{path}: {name} has {size} bytes, the manifest says {entry['bytes']}")
        judged = unflatten({"val_loss": manifest["val_loss"], "info": manifest["info"]}, {})
        return Checkpoint(path, manifest["step"], manifest["healthy"], judged["val_loss"], judged["info"])


def verify(path: Path) -> Checkpoint:
    """A checkpoint of which every byte is what was written, and whose files fit together.

    Raises:
        UnusableCheckpoint: it is not so; says which file and why.
    """
    found = peek(path)
    with _trusting_nothing(path):
        for name, entry in _manifest(path)["files"].items():
            with open(path / name, "rb") as file:
                digest = hashlib.sha256()
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
            if digest.hexdigest() != entry["sha256"]:
                raise UnusableCheckpoint(f"{path}: {name} does not match its checksum")
        skeleton = json.loads((path / SKELETON).read_bytes())
        for part, name in (("model", MODEL), ("training", TRAINING)):
            with safe_open(path / name, framework="pt") as tensors:
                unflatten(skeleton[part], dict.fromkeys(tensors.keys()))
    return found


def remove(path: Path) -> None:
    """Makes a checkpoint absent at once, then deletes it."""
    gone = path.with_name(f".{path.name}.gone-{os.getpid()}")
    with suppress(OSError):  # an undeletable old checkpoint is no reason to stop
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Deletes what a killed process left; a checkpoint it had just set aside to replace it comes back."""
    for left in folder.glob(".step-*"):
        final = folder / left.name[1:].partition(".")[0]
        if ".old-" in left.name and not final.exists():
            left.rename(final)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, allow_nan=False, indent=indent).encode()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, allow_nan=False, sort_keys=True).encode()).hexdigest()


def _write(path: Path, content: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes and synchronises one file; returns its entry in the manifest."""
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for piece in content:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _sync(folder: Path) -> None:
    """Makes the names inside a folder survive a power cut, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _trusting_nothing(path: Path) -> Generator[None, None, None]:
    """Whatever goes wrong in reading says that this is no checkpoint: a file's content is anybody's."""
    try:
        yield
    except FileNotFoundError as error:
        raise UnusableCheckpoint(f"{path}: {Path(error.filename).name} is missing") from error
    except OSError as error:
        raise UnusableCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableCheckpoint(f"{path}: its files do not hold a state ({type(error).__name__})") from error


def _manifest(path: Path) -> dict[str, Any]:
    manifest = json.loads((path / MANIFEST).read_bytes())
    written = manifest.pop("sha256")
    if manifest["format"] != FORMAT:
        raise UnusableCheckpoint(f"{path}: format {manifest['format']} is not {FORMAT}, which this version reads")
    if written != _digest(manifest) or manifest["files"].keys() != {MODEL, TRAINING, SKELETON}:
        raise UnusableCheckpoint(f"{path}: {MANIFEST} does not match its checksum")
    return manifest


def _checked(path: Path, name: str, files: Mapping[str, Any]) -> bytes:
    content = (path / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
        raise UnusableCheckpoint(f"{path}: {name} does not match its checksum")
    return content
