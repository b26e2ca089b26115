"""The files of one step that can be replayed: `step.json`, `batch.safetensors` and `state.safetensors`, without pickle.

`repro.py` writes and reads a step of the trainer with them, `guard/saved_step.py` one of a user's own loop. A model
that is loaded from these files computes the same bits.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from stabletrain.checkpoint.tree import Tree, flatten, to_host, unflatten
from stabletrain.checkpoint.writer import pieces
from stabletrain.errors import ConfigError
from stabletrain.records import Reading, saved_reading
from stabletrain.stored.json_files import Count, DamagedFile, read_file, read_record

FORMAT = 1
STEP, BATCH, STATE = "step.json", "batch.safetensors", "state.safetensors"


class FormatAndStep(TypedDict):
    """The keys that every `step.json` has."""

    format: int
    step: Count


class SourceFile(TypedDict):
    """One of the user's source files, as the run imported it."""

    file: str
    sha256: str | None


class ClosureRecord(SourceFile):
    """How another process imports a closure of a user's loop, and finds its model."""

    module: str
    name: str
    model: str
    path: str


class Metadata(TypedDict, total=False):
    """The run's configuration, and the option of each config group."""

    config: dict[str, Any]
    choices: dict[str, str | None]


class SavedStep(FormatAndStep, total=False):
    """The content of `step.json`: a step of a run, or one of a user's loop, which has `closures`.

    Beside these keys it has, for each file of tensors, their tree under the file's name and its SHA-256.
    """

    micro_batches: Count
    sizes: list[Count]
    loss_scale: float | dict[str, str]
    scaled: bool
    reading: dict[str, Any] | None
    part: dict[str, Any] | None
    compiled: bool
    compiled_for: list[Count] | None
    applied: bool
    code: dict[str, SourceFile] | None
    threads: Count | None
    order: dict[str, list[Count]]
    sources: list[str] | None
    about: Metadata
    closures: list[ClosureRecord]
    precision: str
    comparable: bool
    device: str
    trained: list[str]


def write_step(folder: Path, about: Tree, batch: Tree, model: nn.Module, buffers: Sequence[Tensor]) -> None:
    """Writes the files of a step that can be replayed, into `folder`, which is created if necessary.

    Args:
        about: the content of `step.json`, without the tensors.
        batch: the content of `batch.safetensors`.
        model: with its weights from before the step.
        buffers: values from before the step, in the order of `model.buffers()`.

    Raises:
        OSError: the disk is full or gone.
    """
    names = [name for name, _ in model.named_buffers()]
    state = {"parameters": dict(model.named_parameters()), "buffers": dict(zip(names, buffers, strict=True))}
    skeleton = flatten(about)[1]
    folder.mkdir(parents=True, exist_ok=True)
    # Remove an older `step.json` first: it does not describe the new tensors.
    (folder / STEP).unlink(missing_ok=True)
    for file, tree in ((BATCH, batch), (STATE, state)):
        tensors, skeleton[file] = flatten(to_host(tree))
        skeleton[f"{file} sha256"] = write(folder / file, tensors)
    (folder / STEP).write_text(json.dumps(skeleton, allow_nan=False))


def write_batch(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the batch alone, for a step that cannot be replayed, into `folder`, which is created if necessary.

    Raises:
        OSError: the disk is full or gone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / BATCH, to_host(tensors))


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file; returns its SHA-256."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in pieces(tensors):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def read(folder: Path) -> Tree:
    """Reads `step.json`.

    Raises:
        ConfigError: the file is missing, unreadable or of another format version.
    """
    which = "replay an incident that this version of stabletrain recorded"
    try:
        found = read_record(folder / STEP, SavedStep)
    except DamagedFile as error:
        raise ConfigError(f"{error}: {which}") from error
    if found["format"] != FORMAT:
        raise ConfigError(f"{folder / STEP} is of format {found['format']}; this version reads {FORMAT}: {which}")
    return found


def checked_reading(saved: Mapping[str, Any]) -> Reading:
    """Returns the reading that an incident holds.

    Raises:
        TypeError, AttributeError: it has other keys, or a value that is no number.
    """
    reading = saved_reading(saved)
    for name, value in {**reading._asdict(), **reading.terms}.items():
        if name != "terms" and not isinstance(value, int | float):
            raise TypeError(f"reading/{name} is {value!r}, not a number")
    return reading


def tensors_of(folder: Path, file: str, found: Tree) -> Tree:
    """Reads the tree of one file and verifies its checksum.

    Raises:
        ConfigError: the file cannot be read, or does not match its checksum.
    """
    try:
        content = read_file(folder / file)
    except OSError as error:
        raise ConfigError(f"{folder / file} cannot be read ({error.strerror}): a replay needs it") from error
    if hashlib.sha256(content).hexdigest() != found.get(f"{file} sha256"):
        raise ConfigError(f"{folder / file} does not match its checksum: it is damaged, so the replay would be wrong")
    try:
        tree = unflatten(found[file], safetensors.torch.load(content))
        parts = [tree[name] for name in ("parameters", "buffers")] if file == STATE else []
        if all(isinstance(value, Tensor) for part in parts for value in part.values()):
            return tree
        reason = "a value that is no tensor"
    except (LookupError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise DamagedFile(f"{folder / STEP} is damaged: it does not fit {file} ({reason})")


@torch.no_grad()
def put_(live: Mapping[str, Tensor], saved: Mapping[str, Tensor], folder: Path, strict: bool) -> None:
    """Copies saved values into the tensors of the same names.

    Raises:
        ConfigError: a name is missing on one side, or shapes differ.
    """
    for name in [*saved, *live] if strict else saved:
        if name not in live or name not in saved or live[name].shape != saved[name].shape:
            shapes = [list(of[name].shape) if name in of else "absent" for of in (saved, live)]
            raise ConfigError(
                f"{folder}: '{name}' is {shapes[0]} in the incident and {shapes[1]} in the model: use the "
                "model options of the incident's run"
            )
    for name, value in saved.items():
        live[name].copy_(value)
