"""A repro: everything needed to replay one step, in memory and on disk, and a copy of the model to replay it on.

A skipped step left the weights unchanged, so the live model still has its weights from before the step. Only its
buffers differ, because the next step's forward pass has already run; `step.compute` saved their earlier values, and the
repro holds them. Nothing in a repro is ever modified: a replay runs on `copy_model()`, which has its own weights,
buffers, gradients and attributes, and is not compiled.

On disk a repro is `step.json`, `batch.safetensors` and `state.safetensors`, without pickle. A model that is built from
the run's configuration and loaded from these files computes the same bits.
"""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from stabletrain.checkpoint.capture import Stateful
from stabletrain.checkpoint.tree import Tree, flatten, map_tensors, to_host, unflatten
from stabletrain.checkpoint.writer import pieces
from stabletrain.errors import ConfigError
from stabletrain.forensics.probes.update import UpdateFault
from stabletrain.forensics.user_code import hashes
from stabletrain.guard.checks.recheck import Finding
from stabletrain.guard.policy import NoGuard
from stabletrain.machine.compiling import compiled_shape
from stabletrain.machine.untouched import CONTAINERS
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch, RankPart, Reading, saved_reading
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stored.files import read_file
from stabletrain.stored.json_files import Count, DamagedFile, read_record
from stabletrain.tools import Tools


@dataclass(frozen=True)
class Repro:
    """One step, ready to be replayed.

    Attributes:
        model: with its weights from before the step; only read.
        buffers: values from before the step, in the order of `model.buffers()`.
        step: number of the step, counted from 0; seeds its randomness.
        batch: the whole batch of the step, on the host.
        micro_batches: number of micro-batches of the step.
        tools: the tools of the step. Their loss scale has changed since; see `loss_scale`.
        loss_scale: the step's.
        device: of the model.
        reading: the step's; None if unknown. On several ranks it covers all of them.
        part: this rank's own part of the step, as it measured it; its replays repeat this part. None in one process.
        compiled: whether the user's own code compiled the model, so that a copy computes other bits.
        compiled_for: input shape that the model was compiled for (`machine/compiling.py`); None if it was not compiled.
        changes: tensors of this rank's state that changed between two updates: what, name, and words.
        recheck: the computation that gave another result the second time; None for any other kind of incident.
        update: runs the step again under `trace_update`, and puts everything back; None for any other kind of
            incident. The update was then undone, so `applied` is false.
        applied: whether the update was applied. The weights are then those after the step, and a replay does not repeat
            the step: it only uses the same batch.
        older: returns a captured state (`checkpoint/capture.py`) from before the step; None if none is left.
        fresh: returns another batch, from a data position that the run neither read nor passed.
        deadline: in `time.monotonic()` seconds; replays that have not begun by then are not run.
        metadata: a tree without tensors to save with the repro: the run's configuration, and the time at which it
            `started` to train, with all code imported.
    """

    model: nn.Module
    buffers: Sequence[Tensor]
    step: int
    batch: Batch
    micro_batches: int
    tools: Tools
    loss_scale: float
    device: torch.device
    reading: Reading | None = None
    part: RankPart | None = None
    compiled: bool = False
    compiled_for: tuple[int, ...] | None = None
    changes: Sequence[tuple[str, str, str]] = ()
    recheck: Finding | None = None
    update: Callable[[], UpdateFault | None] | None = None
    applied: bool = False
    older: Callable[[], Tree | None] | None = None
    fresh: Callable[[], Batch] | None = None
    deadline: float = math.inf
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def copy_model(self) -> nn.Module:
        """A copy of the model as it was before the step, without gradients and independent of the live model."""
        model_copy = copy_of_model(self.model)
        self.reset_(model_copy)
        return model_copy

    @torch.no_grad()
    def reset_(self, model_copy: nn.Module) -> None:
        """Restores a copy's buffers to their values before the step."""
        for buffer, before in zip(model_copy.buffers(), self.buffers, strict=True):
            buffer.copy_(before)

    def replay_tools(self) -> Tools:
        """The tools for one process, with a copy of the precision at the step's loss scale."""
        precision = with_loss_scale(self.tools.precision, self.loss_scale)
        return replace(self.tools, precision=precision, parallel=SingleProcess(), guard=NoGuard())

    def to_micro_batches(self, batch: Batch) -> list[Batch]:
        """Moves a host batch to the device and splits it into the step's number of micro-batches."""
        return replace(batch, counted=None, share=1.0).to(self.device).split(self.micro_batches)

    @property
    def comparable(self) -> bool:
        """Whether a replay on a copy of the model must give the step's bits."""
        several = type(self.tools.parallel) is not SingleProcess  # the reading covers all ranks, a replay only one
        return not (
            several or self.applied or self.compiled or any(is_compiled(module) for module in self.model.modules())
        )


def copy_of_model(model: nn.Module) -> nn.Module:
    """A deep copy of a trained model: uncompiled, without gradients, with its parameters' hooks.

    Tensors that a forward pass left in attributes are copied without their graphs. Attributes that cannot be copied (a
    lock, an open file) are shared.
    """
    graphs: dict[int, Any] = {}

    def cut_off(tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            graphs[id(tensor)] = tensor.detach().clone()

    for module in model.modules():
        map_tensors(cut_off, vars(module))
    try:
        model_copy = copy.deepcopy(model, dict(graphs))
    except Exception:  # an attribute that cannot be copied may raise anything
        model_copy = copy.deepcopy(model, uncopyable_attributes(model, graphs) | graphs)
    for mine, live in zip(model_copy.parameters(), model.parameters(), strict=True):
        mine.grad = None
        for hook in (live._backward_hooks or {}).values():
            mine.register_hook(hook)
        for hook in (getattr(live, "_post_accumulate_grad_hooks", None) or {}).values():
            mine.register_post_accumulate_grad_hook(hook)
    return model_copy


def uncopyable_attributes(model: nn.Module, copied: Mapping[int, Any]) -> dict[int, Any]:
    """The attributes of a model's modules that cannot be copied, by `id`."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name in CONTAINERS:
                continue
            try:
                copy.deepcopy(value, dict(copied))
            except Exception:
                found[id(value)] = value
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled by anything except `machine/compiling.py`."""
    code = getattr(module, "_compiled_call_impl", None)
    return (code is not None and compiled_shape(module) is None) or hasattr(module, "_orig_mod")


def with_loss_scale(precision: FullPrecision, loss_scale: float) -> FullPrecision:
    """A copy of a precision at a given loss scale; without a loss scale, an unchanged copy."""
    then = copy.copy(precision)
    if isinstance(then, Stateful) and is_scaled(precision):
        then.load_state_dict({**then.state_dict(), "scale": torch.tensor(loss_scale, dtype=torch.float32)})
    return then


def is_scaled(precision: FullPrecision) -> bool:
    """Whether a precision has a dynamic loss scale."""
    return isinstance(precision, Stateful) and "scale" in precision.state_dict()


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


FORMAT = 1
STEP, BATCH, STATE = "step.json", "batch.safetensors", "state.safetensors"


def save_repro(folder: Path, repro: Repro) -> None:
    """Writes a repro, without `older` and `fresh`, into `folder`, which is created if necessary.

    `step.json` is written last: a folder without it is incomplete.

    Raises:
        OSError: the disk is full or gone.
        TypeError: `metadata` holds anything except dicts with str keys, lists, str, bool, int, float and None.
    """
    model, batch = repro.model, repro.batch
    kept = {"inputs": batch.inputs, "targets": batch.targets, "ids": batch.ids}
    order = {name: dims_by_stride(tensor) for name, tensor in kept.items() if tensor is not None}
    # Keep the memory layout: the choice of kernel, and so the bits, depends on it.
    laid_out = {name: tensor.permute(order[name]) for name, tensor in kept.items() if tensor is not None}
    about = {
        "format": FORMAT,
        "step": repro.step,
        "micro_batches": repro.micro_batches,
        "loss_scale": repro.loss_scale,
        "scaled": is_scaled(repro.tools.precision),
        "reading": None if repro.reading is None else repro.reading._asdict(),
        "part": None if repro.part is None else repro.part._asdict(),
        "compiled": not replace(repro, applied=False).comparable,
        "compiled_for": None if repro.compiled_for is None else [*repro.compiled_for],
        "applied": repro.applied,
        "code": hashes(model, repro.tools, repro.metadata.get("started", math.inf)),
        "threads": torch.get_num_threads(),  # the order of sums depends on it
        "order": order,
        "sources": None if batch.sources is None else [*batch.sources],
        "about": repro.metadata,
    }
    write_step(folder, about, laid_out, model, repro.buffers)


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


def save_batch(folder: Path, batch: Batch) -> None:
    """Writes the batch alone, for a step that cannot be replayed.

    Raises:
        OSError: the disk is full or gone.
    """
    kept = {"inputs": batch.inputs, "targets": batch.targets, "ids": batch.ids}
    write(folder / BATCH, to_host({name: tensor for name, tensor in kept.items() if tensor is not None}))


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file; returns its SHA-256."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in pieces(tensors):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def dims_by_stride(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor in memory order, outermost first."""
    return sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))


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


def about(folder: Path) -> dict[str, Any]:
    """Reads the repro's metadata: enough to build its model and tools.

    Raises:
        ConfigError: as `read`.
    """
    return unflatten(read(folder)["about"], {})


def load_repro(folder: Path, model: nn.Module, tools: Tools, *, strict: bool = True) -> Repro:
    """Loads what `save_repro` wrote, with tools built as the run built them or with a fix to try.

    Args:
        model: built as the run built it, on the device to replay on; receives the repro's weights.
        strict: if false, parts of the model that the repro does not contain keep their values.

    Raises:
        ConfigError: a file is missing or damaged, or the repro is of another model.
    """
    found = read(folder)
    state, kept = tensors_of(folder, STATE, found), tensors_of(folder, BATCH, found)
    put_(dict(model.named_parameters()), state["parameters"], folder, strict)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    put_(buffers, state["buffers"], folder, strict)
    try:
        laid_out = {name: kept[name].permute(inverse_permutation(order)) for name, order in found["order"].items()}
        batch = Batch(laid_out["inputs"], laid_out["targets"], laid_out.get("ids"), found["sources"])
        reading, part, loss_scale = unflatten([found["reading"], found.get("part"), found["loss_scale"]], {})
        reading = None if reading is None else checked_reading(reading)
        part = None if part is None else RankPart(**part)
        rest = [found[key] for key in ("scaled", "micro_batches", "compiled", "about")]
        if not isinstance(loss_scale, int | float):
            raise TypeError(f"loss_scale is {loss_scale!r}, not a number")
        if not 1 <= rest[1] <= max(len(batch), 1) or len(batch) % rest[1]:
            raise ValueError(f"{rest[1]} micro-batches of a batch of {len(batch)} samples")
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedFile(f"{folder / STEP} is damaged ({type(error).__name__}: {error})") from error
    if not (found["scaled"] and is_scaled(tools.precision)):  # a fix changes the precision
        loss_scale = float(tools.precision.loss_scale())
    return Repro(
        model=model,
        buffers=[*buffers.values()],
        step=found["step"],
        batch=batch,
        micro_batches=found["micro_batches"],
        tools=tools,
        loss_scale=loss_scale,
        device=next(model.parameters()).device,
        reading=reading,
        part=part,
        compiled=found["compiled"],
        compiled_for=None if (shape := found.get("compiled_for")) is None else tuple(shape),
        applied=found.get("applied", False),
        metadata=unflatten(found["about"], {}),
    )


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


def inverse_permutation(order: Sequence[int]) -> list[int]:
    """The inverse permutation."""
    return sorted(range(len(order)), key=lambda place: order[place])
