"""Writes a checkpoint that is complete or absent at every instant, and that needs no pickle to read.

`step-00000500/` holds `model.safetensors` (the names of `model.state_dict()`, for any program), `training.safetensors`
(all other tensors), `state.json` (the skeletons of `checkpoint/tree.py`) and `manifest.json` (sizes and SHA-256 of the
other three, and of itself). It is written under a hidden temporary name, each file and the folder are synchronized to
disk, and one rename makes it appear. `sharded.py` writes such a folder from several ranks.

The safetensors files (8 bytes of length, a JSON header, the tensors' bytes) are written here, because the library's
`save_file` cannot hash and synchronize what it writes, and creates files that only their owner can read.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stabletrain.checkpoint.reader import FORMAT, MANIFEST, MODEL, SKELETON, TRAINING, UnusableCheckpoint, peek, render
from stabletrain.checkpoint.tree import Tree, flatten

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Safetensors' names for the dtypes it supports."""


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file, without copying the tensors.

    Args:
        tensors: contiguous, on the CPU, any shape. Views of their memory are yielded, so it must not change meanwhile.

    Raises:
        TypeError: safetensors does not support a dtype.
    """
    # Widest dtype first, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise TypeError(f"state '{name}' is {tensor.dtype}, which safetensors cannot hold")
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy())


SECOND_MOMENT = "exp_avg_sq"
"""PyTorch's name for the running mean of squared gradients."""


def unsound(tree: Tree) -> str | None:
    """Returns why the first bad tensor among weights, buffers, optimizer state and averages is bad; None if none is."""
    judged = {"model": tree["model"], "optimizer": tree.get("optimizer", {}).get("state", {})}
    judged |= {"average": tree.get("average", {}).get("tensors", {})}
    return unsound_among(flatten(judged)[0])


def unsound_among(tensors: Mapping[str, Tensor]) -> str | None:
    """Does the same for tensors, or shards of them, named `model/<name>` and `optimizer/<name>/<kind>`."""
    # Every value must be finite. A second moment is a mean of squares: a negative one was corrupted, and its square
    # root would be NaN in the next update.
    for path, tensor in tensors.items():
        name = path.removeprefix("model/")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
        if path.endswith(f"/{SECOND_MOMENT}") and bool((tensor < 0).any()):
            return f"{name} is negative"
    return None


NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM}
"""Error codes of file systems that cannot synchronize a folder."""


FileContent = Iterable[bytes | memoryview]
"""The bytes of a file, in pieces."""

WriteFile = Callable[[Path, FileContent], dict[str, Any]]
"""Writes and synchronizes a file; returns its manifest entry, as `write_file` does."""


def write_file(path: Path, content: FileContent) -> dict[str, Any]:
    """Writes and synchronizes one file; returns its manifest entry."""
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for piece in content:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


@dataclass(frozen=True)
class FullState:
    """A state that one process holds whole.

    Attributes:
        tree: contiguous CPU tensors that must not change during the write, with a `model` at the top.
        write_file: writes the files of tensors.
    """

    tree: Tree
    write_file: WriteFile

    def publish(self, folder: Path, about: Mapping[str, Any]) -> tuple[Path, str | None]:
        """Writes the checkpoint, as `write` does. Also returns its first bad tensor if it was believed healthy.

        Args:
            folder: the folder of checkpoints.
            about: `step`, `healthy`, `val_loss`, `info`.
        """
        bad = unsound(self.tree) if about["healthy"] else None
        judged: dict[str, Any] = {**about, "healthy": about["healthy"] and bad is None}
        return write(folder, self.tree, **judged, write_file=self.write_file), bad


def write(
    folder: Path,
    tree: Tree,
    *,
    step: int,
    info: Mapping[str, Any],
    healthy: bool,
    val_loss: float | None,
    write_file: WriteFile = write_file,
) -> Path:
    """Writes `folder/step-XXXXXXXX` and returns its path. An existing checkpoint of that name is replaced.

    Args:
        folder: the folder of checkpoints; created if it does not exist.
        tree: contiguous CPU tensors that must not change during the write, with a `model` at the top.
        write_file: writes the files of tensors.

    Raises:
        OSError: the disk is full or gone. No incomplete checkpoint is left, and an older one of that name is kept.
    """
    model, model_skeleton = flatten(tree["model"])
    training, training_skeleton = flatten({key: child for key, child in tree.items() if key != "model"})
    skeleton = {"model": model_skeleton, "training": training_skeleton}
    about = {"step": step, "healthy": healthy, "val_loss": val_loss, "info": info}
    temporary = hidden(folder, step)
    delete(temporary)
    try:
        temporary.mkdir(parents=True)
        files = {
            MODEL: write_file(temporary / MODEL, pieces(model)),
            TRAINING: write_file(temporary / TRAINING, pieces(training)),
            SKELETON: write_skeleton(temporary, skeleton),
        }
    except BaseException:
        delete(temporary)
        raise
    return publish(temporary, folder, FORMAT, about, files)


def publish(
    temporary: Path, folder: Path, form: int, about: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
) -> Path:
    """Turns files that are all on disk into a checkpoint: writes the manifest, then renames the folder.

    Args:
        temporary: a hidden folder in `folder`, with the files.
        form: number of the format.
        about: `step`, `healthy`, `val_loss`, `info`.
        files: the manifest's entries, by name.

    Raises:
        OSError: as `write`; `temporary` is deleted.
    """
    step, healthy = about["step"], about["healthy"]
    manifest: dict[str, Any] = {"format": form, "step": step, "healthy": healthy}
    manifest |= flatten({"val_loss": about["val_loss"], "info": about["info"]})[1]
    final = folder / f"step-{step:08d}"
    old = folder / f".{final.name}.old-{os.getpid()}"
    try:
        write_file(temporary / MANIFEST, [render({**manifest, "files": files})])
        sync(temporary)
        # A rename cannot replace a folder that is not empty, so the old checkpoint is set aside first.
        if os.path.lexists(final):
            final.rename(old)
        temporary.rename(final)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(final):
            with suppress(OSError):  # raise the first error; `tidy` restores it too
                old.rename(final)
        delete(temporary)
        raise
    with suppress(OSError):  # complete already; a power cut can only undo the rename
        sync(folder)
    delete(old)
    return final


def hidden(folder: Path, step: int, serial: str = "") -> Path:
    """Returns where the checkpoint of `step` is written before it appears. `tidy` deletes leftovers."""
    return folder / f".step-{step:08d}.tmp-{os.getpid()}{serial}"


def write_skeleton(temporary: Path, skeleton: Mapping[str, Tree]) -> dict[str, Any]:
    """Writes `state.json`; returns its manifest entry."""
    return write_file(temporary / SKELETON, [json.dumps(skeleton, allow_nan=False).encode()])


def remove(path: Path) -> None:
    """Makes a checkpoint disappear by one rename, then deletes it. Raises OSError if it is still there."""
    gone = path.with_name(f".{path.name}.gone-{os.getpid()}")
    delete(gone)
    path.rename(gone)
    delete(gone)


def tidy(folder: Path) -> None:
    """Deletes what a killed process left. Restores a checkpoint it had set aside, unless its replacement is complete.

    Raises:
        OSError: the folder cannot be read, or a checkpoint to restore cannot be renamed.
    """
    for left in sorted(folder.glob(".step-*")):
        final = folder / left.name[1:].partition(".")[0]
        if ".old-" in left.name and not _stands(final):
            if os.path.lexists(final):
                remove(final)
            left.rename(final)
        else:
            delete(left)


def try_out(folder: Path) -> None:
    """Creates the folder if needed, and writes and synchronizes a file there. Raises OSError if that fails."""
    probe = folder / f".step-probe.gone-{os.getpid()}"
    delete(probe)
    try:
        probe.mkdir(parents=True)
        write_file(probe / MANIFEST, [b"\n"])
    finally:
        delete(probe)


def _stands(path: Path) -> bool:
    """Returns whether a checkpoint passes `peek`."""
    try:
        peek(path)
    except UnusableCheckpoint:
        return False
    return True


def sync(path: Path) -> None:
    """Makes the names inside a folder, or a file's content, survive a power cut, if the file system supports that."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def delete(path: Path) -> None:
    """Deletes a folder, a file or a link as far as possible. Errors are ignored: leftovers have a hidden name."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
