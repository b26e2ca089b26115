"""Reads a checkpoint after verifying it, without pickle.

Verifies checksums before loading; rejects a checkpoint if any byte differs from what was written. The error names the
file and the reason.

One process (`writer.py`) or several ranks (`sharded.py`) may have written the checkpoint. Either kind can be read
whole, or each rank reads only the parts that it needs.
"""

import hashlib
import json
import re
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stabletrain.checkpoint.tree import Tree, unflatten
from stabletrain.errors import ConfigError
from stabletrain.stored.json_files import read_file

CHUNK = 1 << 20


class UnusableCheckpoint(ConfigError):
    """Not a checkpoint, or one that differs from what was written. The message names the file and the reason."""


def checked(path: Path, name: str, files: Mapping[str, Any]) -> bytes:
    """Returns a file's content; raises UnusableCheckpoint if its checksum is wrong."""
    with naming(path, name):
        content = read_file(path / name)
    compare(path, name, files, hashlib.sha256(content).hexdigest())
    return content


def check(path: Path, name: str, files: Mapping[str, Any]) -> None:
    """Reads a file in full; raises UnusableCheckpoint if its checksum is wrong."""
    size(path, name)  # raises if it is not a regular file, e.g. a pipe
    digest = hashlib.sha256()
    with naming(path, name), open(path / name, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    compare(path, name, files, digest.hexdigest())


def compare(path: Path, name: str, files: Mapping[str, Any], digest: str) -> None:
    """Raises UnusableCheckpoint if `digest` is not the checksum in the manifest."""
    if digest != files[name]["sha256"]:
        raise UnusableCheckpoint(f"{path}: {name} does not match its checksum")


def size(path: Path, name: str) -> int:
    """Returns the size of a regular file in bytes."""
    with naming(path, name):
        status = (path / name).stat()
        # Reading a pipe or a device could block forever.
        if not stat.S_ISREG(status.st_mode):
            raise UnusableCheckpoint(f"{path}: {name} is not a regular file")
        return status.st_size


@contextmanager
def naming(path: Path, name: str) -> Generator[None, None, None]:
    """Turns any error of reading a file into UnusableCheckpoint, with the file's name."""
    try:
        yield
    except FileNotFoundError as error:
        raise UnusableCheckpoint(f"{path}: {name} is missing") from error
    except NotADirectoryError as error:
        raise UnusableCheckpoint(f"{path} is a file, not a folder") from error
    except OSError as error:
        raise UnusableCheckpoint(f"{path}: {name} cannot be read ({error.strerror or error})") from error
    # The content can be anything, so parsing it can raise almost anything.
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise UnusableCheckpoint(f"{path}: {name} has unexpected content ({type(error).__name__})") from error


MODEL, TRAINING, SKELETON, MANIFEST = ("model.safetensors", "training.safetensors", "state.json", "manifest.json")

WHOLE = {"model": MODEL, "training": TRAINING}
"""The file of each part, if one process wrote the checkpoint."""

PIECE = re.compile(r"(model|training)/shard-[0-9]{5,}-model-00001-of-00001\.safetensors")
"""The files of each part, if several ranks wrote the checkpoint. The names are DCP's."""


def parts_of(part: str, files: Mapping[str, Any]) -> list[str]:
    """Returns the names of the files of `part` ("model" or "training"), sorted."""
    return sorted(name for name in files if name == WHOLE[part] or name.startswith(f"{part}/"))


def tensors_in(
    path: Path, part: str, files: Mapping[str, Any], skeleton: Mapping[str, Tree], places: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """Returns one part of the tree, whole or with this rank's shards of `places` (keyed by the names in the files)."""
    names = parts_of(part, files)
    if places is None and names == [WHOLE[part]]:
        content = checked(path, names[0], files)
        with naming(path, names[0]):
            return unflatten(skeleton[part], safetensors.torch.load(content))
    from stabletrain.checkpoint import dcp

    # With `places` nothing is verified again: for that, every rank would have to read every file.
    for name in names if places is None else ():
        check(path, name, files)
    with naming(path, label(part, names)):
        tensors = dcp.read([path / name for name in names], shapes_of(part, skeleton), places or {})
        return unflatten(skeleton[part], tensors)


def places_of_moments(path: Path, skeleton: Tree, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Maps each moment and the average of a sharded parameter, by its name in the files, to the parameter's place."""
    with naming(path, SKELETON):
        moments = _named(skeleton["optimizer"]["state"]) if "optimizer" in skeleton else {}
        averages = _named(skeleton["average"]["tensors"]) if "average" in skeleton else {}
        moments = [*moments.items(), *((name, {"average": each}) for name, each in averages.items())]
        return {
            name: places[parameter]
            for parameter, kinds in moments
            if parameter in places
            for name in kinds.values()
            if isinstance(name, _Name)
        }


class _Name(str):
    """A tensor's name, standing in for the tensor in a tree."""


def _named(skeleton: Tree) -> Tree:
    """Returns the tree with each tensor replaced by its name."""

    class Itself(dict):
        def __missing__(self, name: str) -> _Name:
            return _Name(name)

    return unflatten(skeleton, Itself())


def names_in(path: Path, part: str, names: Sequence[str], skeleton: Mapping[str, Tree]) -> list[str]:
    """Returns the names of the tensors in the files of one part; checks that the stored pieces cover every tensor."""
    if names == [WHOLE[part]]:
        with safe_open(path / names[0], framework="pt") as tensors:
            return list(tensors.keys())
    from stabletrain.checkpoint import dcp

    return list(dcp.opened([path / name for name in names], shapes_of(part, skeleton))[1]) if names else []


def shapes_of(part: str, skeleton: Mapping[str, Tree]) -> Mapping[str, Sequence[int]] | None:
    """Returns the shapes of all tensors of a part by name; None if one process wrote it."""
    return dict(skeleton["shapes"][part]) if "shapes" in skeleton else None


def label(part: str, names: Sequence[str]) -> str:
    """Returns what messages call the files of a part."""
    return names[0] if names == [WHOLE[part]] else f"{part}/"


FORMAT, PARTED = (1, 2)
"""Format numbers. 1: a file for the model and one for all other tensors. 2: a folder for each, a file per rank."""

LARGEST_MANIFEST = 1 << 24
"""Upper bound on the manifest in bytes (a few hundred are normal), since it is read whole before it can be verified."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk.

    Attributes:
        step: steps done when it was taken.
        healthy: whether the caller judged it healthy and its weights and moments are sound (`writer.py`).
        val_loss: the last validation loss known then, nats per target; None if there was none.
        info: plain JSON values that the caller stored with it.
    """

    path: Path
    step: int
    healthy: bool
    val_loss: float | None
    info: Mapping[str, Any]

    def load(self, places: Mapping[str, Tensor] | None = None) -> Tree:
        """Returns the tree, on the CPU. Verifies every checksum again, unless `places` are given.

        Args:
            places: the sharded tensors of the live model by name. Each rank then reads only its shards of them and of
                their moments, as a `Piece`; everything else is read whole.

        Raises:
            UnusableCheckpoint: a file is missing or differs from what was written.
        """
        manifest = _manifest(self.path)
        files, skeleton = manifest["files"], _skeleton(self.path, manifest)
        near = places_of_moments(self.path, skeleton["training"], places) if places else None
        training = tensors_in(self.path, "training", files, skeleton, near)
        return {"model": tensors_in(self.path, "model", files, skeleton, places or None), **training}

    def load_model(self) -> dict[str, Any]:
        """Returns the model's `state_dict` alone, on the CPU; raises as `load` does."""
        manifest = _manifest(self.path)
        return tensors_in(self.path, "model", manifest["files"], _skeleton(self.path, manifest), None)

    def load_average(self) -> dict[str, Tensor]:
        """Returns the averages of weights and buffers by name, fp32, on the CPU; of a shared weight, one.

        Raises:
            UnusableCheckpoint: as `load` does, or there are none.
        """
        manifest = _manifest(self.path)
        skeleton = _skeleton(self.path, manifest)
        average = tensors_in(self.path, "training", manifest["files"], skeleton, None).get("average")
        if average is None or not int(average["count"]):
            why = "was trained with averaging=none" if average is None else "is from before the first of them"
            raise UnusableCheckpoint(f"{self.path} has no averaged weights: it {why}; fix: use the live ones")
        return dict(average["tensors"])

    def model_files(self) -> dict[str, str]:
        """Returns the SHA-256 of each file that holds the model, by name, as the manifest has it; raises as `load`."""
        files = _manifest(self.path)["files"]
        return {name: str(files[name]["sha256"]) for name in parts_of("model", files)}


def peek(path: Path) -> Checkpoint:
    """Returns a checkpoint after checking its manifest and its files' sizes, without reading the tensors.

    Raises:
        UnusableCheckpoint: it is not a checkpoint, was altered, or a file has the wrong size.
    """
    manifest = _manifest(path)
    for name, entry in manifest["files"].items():
        if (there := size(path, name)) != entry["bytes"]:
            raise UnusableCheckpoint(f"{path}: {name} has {there} bytes, the manifest says {entry['bytes']}")
    return _checkpoint(path, manifest)


def verify(path: Path, rank: int = 0, count: int = 1) -> Checkpoint:
    """Verifies the checksum of every file, and that the files fit together; returns the checkpoint.

    Args:
        path: its folder.
        rank, count: this process among those that share the work. Only if none of them raises is everything verified.

    Raises:
        UnusableCheckpoint: a check failed; names the file and the reason.
    """
    if rank == 0:
        peek(path)
    manifest = _manifest(path)
    files = manifest["files"]
    for name in [name for name in files if name != SKELETON][rank::count]:
        check(path, name, files)
    if rank == 0:
        skeleton = _skeleton(path, manifest)
        for part in WHOLE:
            names = parts_of(part, files)
            with naming(path, label(part, names)):
                unflatten(skeleton[part], dict.fromkeys(names_in(path, part, names, skeleton)))
    return _checkpoint(path, manifest)


def render(manifest: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest: its values and, last, their SHA-256."""
    return json.dumps({**manifest, "sha256": _digest(manifest)}, allow_nan=False, indent=2).encode()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, allow_nan=False, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=32)  # each checkpoint of a run reads those of all earlier ones
def _parsed(content: bytes) -> tuple[dict[str, Any], bool]:
    """Returns the values of a manifest without the checksum, and whether `render` makes the same bytes of them.

    Compares bytes, not values: a flipped bit need not change the parsed values.
    """
    manifest = json.loads(content)
    manifest.pop("sha256", None)
    return manifest, content == render(manifest)


def _manifest(path: Path) -> dict[str, Any]:
    """Returns the verified values of the manifest, with `val_loss` and `info` as they were given."""
    with naming(path, MANIFEST):
        if (there := size(path, MANIFEST)) > LARGEST_MANIFEST:
            raise UnusableCheckpoint(f"{path}: {MANIFEST} has {there} bytes, too many for a manifest")
        manifest, same = _parsed(read_file(path / MANIFEST))
        if (form := manifest["format"]) not in (FORMAT, PARTED):
            raise UnusableCheckpoint(f"{path}: {MANIFEST} has format {form}; this version reads {FORMAT} and {PARTED}")
        named = manifest["files"].keys() - {SKELETON}
        ours = all(map(PIECE.fullmatch, named)) if form == PARTED else named == {MODEL, TRAINING}
        if not same or not ours or SKELETON not in manifest["files"]:
            raise UnusableCheckpoint(f"{path}: {MANIFEST} does not match its checksum")
        given = unflatten({"val_loss": manifest["val_loss"], "info": manifest["info"]}, {})
        return manifest | given


def _skeleton(path: Path, manifest: Mapping[str, Any]) -> dict[str, Tree]:
    """Returns the verified `state.json`: the skeletons of both parts, and the tensors' shapes if ranks wrote shards."""
    files = manifest["files"]
    content = checked(path, SKELETON, files)
    with naming(path, SKELETON):
        skeleton = json.loads(content)
        return {part: dict(skeleton[part]) for part in (*WHOLE, *(() if MODEL in files else ("shapes",)))}


def _checkpoint(path: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(path, manifest["step"], manifest["healthy"], manifest["val_loss"], manifest["info"])
