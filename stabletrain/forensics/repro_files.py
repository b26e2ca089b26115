"""A repro as files: `scene.json`, `batch.safetensors` and `state.safetensors`, all without pickle.

A model built from the run's configuration and filled from them computes the same bits.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from stabletrain.checkpoint.tree import Tree, flatten, to_host, unflatten
from stabletrain.checkpoint.writer import pieces
from stabletrain.errors import ConfigError
from stabletrain.forensics.repro import Repro, is_scaled
from stabletrain.protocols import Tools
from stabletrain.records import Batch, Reading

FORMAT = 1
SCENE, BATCH, STATE = "scene.json", "batch.safetensors", "state.safetensors"


def save_repro(folder: Path, repro: Repro) -> None:
    """Writes a repro into `folder`, which is made where it does not exist; `scene.json`, the last, makes it one.

    `older` and `fresh` are not kept.

    Raises:
        OSError: the disk is full or gone.
        TypeError: `about` holds something else than dicts with str keys, lists, str, bool, int, float and None.
    """
    model, batch = repro.model, repro.batch
    names = [name for name, _ in model.named_buffers()]
    state = {
        "parameters": dict(model.named_parameters()),
        "buffers": dict(zip(names, repro.buffers, strict=True)),
    }
    kept = {"inputs": batch.inputs, "targets": batch.targets, "ids": batch.ids}
    order = {name: by_stride(tensor) for name, tensor in kept.items() if tensor is not None}
    laid_out = {name: tensor.permute(order[name]) for name, tensor in kept.items() if tensor is not None}
    about = {
        "format": FORMAT,
        "step": repro.step,
        "micro_batches": repro.micro_batches,
        "loss_scale": repro.loss_scale,
        "scaled": is_scaled(repro.tools.precision),
        "reading": None if repro.reading is None else repro.reading._asdict(),
        "compiled": not replace(repro, applied=False).comparable,
        "compiled_for": None if repro.compiled_for is None else [*repro.compiled_for],
        "applied": repro.applied,
        "threads": torch.get_num_threads(),
        "order": order,
        "sources": None if batch.sources is None else [*batch.sources],
        "about": repro.metadata,
    }
    skeleton = flatten(about)[1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCENE).unlink(missing_ok=True)
    for file, tree in ((BATCH, laid_out), (STATE, state)):
        tensors, skeleton[file] = flatten(to_host(tree))
        skeleton[f"{file} sha256"] = write(folder / file, tensors)
    (folder / SCENE).write_text(json.dumps(skeleton, allow_nan=False))


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file; returns its SHA-256."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in pieces(tensors):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def by_stride(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor as they lie in memory, the outermost first: which kernel runs depends on it."""
    return sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))


def read(folder: Path) -> Tree:
    """What `scene.json` says.

    Raises:
        ConfigError: there is none, or none of this version.
    """
    try:
        found = json.loads((folder / SCENE).read_text())
        if found["format"] == FORMAT:
            return found
        reason = f"is of format {found['format']}; this version reads {FORMAT}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"cannot be read ({type(error).__name__})"
    raise ConfigError(f"{folder / SCENE} {reason}: replay an incident that this version of stabletrain recorded")


def about(folder: Path) -> dict[str, Any]:
    """What was to be kept with the repro: enough to build its model and tools again.

    Raises:
        ConfigError: as `load_scene`.
    """
    return unflatten(read(folder)["about"], {})


def load_repro(folder: Path, model: nn.Module, tools: Tools, *, strict: bool = True) -> Repro:
    """The repro that `save_repro` wrote.

    Args:
        folder: the incident's.
        model: built as the run built it, on the device to run on; the repro's weights are written into it.
        tools: built as the run built them, or others, to see what they would have made of the step.
        strict: False leaves what the repro does not know of the model as it is, for a model with a part more.

    Raises:
        ConfigError: a file is missing or damaged, or the model is not that of the repro.
    """
    found = read(folder)
    state, kept = tensors_of(folder, STATE, found), tensors_of(folder, BATCH, found)
    put_(dict(model.named_parameters()), state["parameters"], folder, strict)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    put_(buffers, state["buffers"], folder, strict)
    laid_out = {name: kept[name].permute(inverse(order)) for name, order in found["order"].items()}
    batch = Batch(laid_out["inputs"], laid_out["targets"], laid_out.get("ids"), found["sources"])
    reading, loss_scale = unflatten([found["reading"], found["loss_scale"]], {})
    if not (found["scaled"] and is_scaled(tools.precision)):  # another precision than the step's is tried
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
        reading=None if reading is None else Reading(**reading),
        compiled=found["compiled"],
        compiled_for=None if (shape := found.get("compiled_for")) is None else tuple(shape),
        applied=found.get("applied", False),
        metadata=unflatten(found["about"], {}),
    )


def tensors_of(folder: Path, file: str, found: Tree) -> Tree:
    """The tree of one file, of which every byte is what was written.

    Raises:
        ConfigError: it is not so.
    """
    try:
        content = (folder / file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{folder / file} cannot be read ({error.strerror}): nothing is replayed without") from error
    if hashlib.sha256(content).hexdigest() != found[f"{file} sha256"]:
        raise ConfigError(f"{folder / file} does not match its checksum: it is damaged, and would replay another step")
    return unflatten(found[file], safetensors.torch.load(content))


@torch.no_grad()
def put_(live: Mapping[str, Tensor], saved: Mapping[str, Tensor], folder: Path, strict: bool) -> None:
    """Copies saved values into the tensors of the same names."""
    for name in [*saved, *live] if strict else saved:
        if name not in live or name not in saved or live[name].shape != saved[name].shape:
            shapes = [list(of[name].shape) if name in of else "absent" for of in (saved, live)]
            raise ConfigError(
                f"{folder}: '{name}' is {shapes[0]} in the incident and {shapes[1]} in the model: replay it with the "
                "model's options of its own run"
            )
    for name, value in saved.items():
        live[name].copy_(value)


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `order`."""
    return sorted(range(len(order)), key=lambda place: order[place])
