"""Writes a checkpoint, complete or not at all.

The safetensors format, piece by piece: a header, then each tensor's own memory, so that no second copy is
made.

Format: 8 bytes of length, a JSON header, the tensors' bytes (github.com/huggingface/safetensors, "Format").
The library's `save_file` leaves no chance to hash and synchronise what is written, and makes files that only
their owner can read. Reading is the library's.

Health: what makes a checkpoint unhealthy whatever its owner believes of it.

Writing a checkpoint: a folder that is complete or absent at every instant, and that nobody needs pickle to read.

`step-00000500/` holds `model.safetensors` (the names of `model.state_dict()`, for any program), `training.safetensors`
(all other tensors), `state.json` (the skeletons of `checkpoint/tree.py`) and `manifest.json` (sizes and SHA-256 of the
other three, and of itself). It is written under a hidden temporary name, each file and the folder are synchronised to
the disk, and one rename makes it appear. Reading (`reader.py`) checks every byte first. A state that is sharded is
written by all ranks (`sharded.py`), into such a folder as well.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
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
"""Safetensors' names of the dtypes it can hold."""


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file.

    Args:
        tensors: contiguous, on the CPU, any shape; their memory is handed out, not copied.

    Raises:
        TypeError: a dtype that the format does not know.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each one is aligned
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
"""PyTorch's name of the running mean of squared gradients."""


def unsound(tree: Tree) -> str | None:
    """Why the first bad tensor among weights, buffers and optimizer state is bad; None if there is none."""
    judged = {"model": tree["model"], "optimizer": tree.get("optimizer", {}).get("state", {})}
    return unsound_among(flatten(judged)[0])


def unsound_among(tensors: Mapping[str, Tensor]) -> str | None:
    """The same of tensors, or of parts of them, that are named `model/<name>` and `optimizer/<name>/<kind>`.

    A weight or moment must be finite; a second moment, as a mean of squares, at least 0: one that is below was damaged,
    and its square root would be NaN in the very next update.
    """
    for path, tensor in tensors.items():
        name = path.removeprefix("model/")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
        if path.endswith(f"/{SECOND_MOMENT}") and bool((tensor < 0).any()):
            return f"{name} is negative"
    return None


NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM}
"""What a file system answers that cannot synchronise a folder."""


@dataclass(frozen=True)
class FullState:
    """A state that one process has all of.

    Attributes:
        tree: contiguous CPU tensors that nobody changes meanwhile, with a `model` at its top.
    """

    tree: Tree

    def publish(
        self, folder: Path, *, step: int, info: Mapping[str, Any], healthy: bool, val_loss: float | None
    ) -> tuple[Path, str | None]:
        """Writes the checkpoint, as `write` does, and says what is unsound in it where it was believed healthy."""
        bad = unsound(self.tree) if healthy else None
        path = write(folder, self.tree, step=step, info=info, healthy=healthy and bad is None, val_loss=val_loss)
        return path, bad


def write(
    folder: Path, tree: Tree, *, step: int, info: Mapping[str, Any], healthy: bool, val_loss: float | None
) -> Path:
    """Writes `folder/step-XXXXXXXX` and returns it; one of that name is replaced.

    Args:
        folder: the folder of checkpoints; made where it does not exist.
        tree: contiguous CPU tensors that nobody changes meanwhile, with a `model` at its top.

    Raises:
        OSError: the disk is full or gone; nothing half-written is left under a checkpoint's name, and one that was to
            be replaced is still there.
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
    """Makes files that are all on the disk a checkpoint: writes its manifest, and lets it appear by one rename.

    Args:
        temporary: where the files are: a hidden folder in `folder`.
        folder: the folder of checkpoints.
        form: number of the format.
        about: `step`, `healthy`, `val_loss`, `info`.
        files: the manifest's entries, by name.

    Raises:
        OSError: as `write`; `temporary` is gone then.
    """
    step, healthy = about["step"], about["healthy"]
    manifest: dict[str, Any] = {"format": form, "step": step, "healthy": healthy}
    manifest |= flatten({"val_loss": about["val_loss"], "info": about["info"]})[1]
    final = folder / f"step-{step:08d}"
    old = folder / f".{final.name}.old-{os.getpid()}"
    try:
        write_file(temporary / MANIFEST, [render({**manifest, "files": files})])
        sync(temporary)
        if os.path.lexists(final):
            final.rename(old)
        temporary.rename(final)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(final):
            with suppress(OSError):  # what stopped the write matters more, and `tidy` brings it back too
                old.rename(final)
        delete(temporary)
        raise
    with suppress(OSError):  # it is there, and whole; a power cut can at most take the name back
        sync(folder)
    delete(old)
    return final


def hidden(folder: Path, step: int, serial: str = "") -> Path:
    """Where the checkpoint of `step` is written before it appears; `tidy` deletes what is left there."""
    return folder / f".step-{step:08d}.tmp-{os.getpid()}{serial}"


def write_skeleton(temporary: Path, skeleton: Mapping[str, Tree]) -> dict[str, Any]:
    """Writes `state.json`; returns its entry."""
    return write_file(temporary / SKELETON, [json.dumps(skeleton, allow_nan=False).encode()])


def remove(path: Path) -> None:
    """Makes a checkpoint absent at once, then deletes it.

    Raises:
        OSError: it is still there.
    """
    gone = path.with_name(f".{path.name}.gone-{os.getpid()}")
    delete(gone)
    path.rename(gone)
    delete(gone)


def tidy(folder: Path) -> None:
    """Deletes what a killed process left; a checkpoint that it had set aside to replace it comes back, unless the
    new one is in its place and whole.

    Raises:
        OSError: the folder cannot be read, or one that should come back cannot be renamed.
    """
    for left in sorted(folder.glob(".step-*")):
        final = folder / left.name[1:].partition(".")[0]
        if ".old-" in left.name and not _stands(final):
            if os.path.lexists(final):
                final.rename(folder / f".{final.name}.gone-{os.getpid()}")
                delete(folder / f".{final.name}.gone-{os.getpid()}")
            left.rename(final)
        else:
            delete(left)


def try_out(folder: Path) -> None:
    """Makes the folder if there is none, and writes a byte into it and to the disk, as a checkpoint's would be.

    Raises:
        OSError: no checkpoint can be written there.
    """
    probe = folder / f".step-probe.gone-{os.getpid()}"
    delete(probe)
    try:
        probe.mkdir(parents=True)
        write_file(probe / MANIFEST, [b"\n"])
    finally:
        delete(probe)


def _stands(path: Path) -> bool:
    """Whether there is a checkpoint that looks whole."""
    try:
        peek(path)
    except UnusableCheckpoint:
        return False
    return True


def write_file(path: Path, content: Iterable[bytes | memoryview]) -> dict[str, Any]:
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


def sync(folder: Path) -> None:
    """Makes the names inside a folder survive a power cut, where the file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def delete(path: Path) -> None:
    """Deletes a folder, a file or a link, as far as that can be done: what stays has a hidden name and harms nobody."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
