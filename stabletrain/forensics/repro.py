"""A repro: everything needed to replay one step of the trainer, in memory and on disk.

A skipped step left the weights unchanged, so the live model still has its weights from before the step. Only its
buffers differ, because the next step's forward pass has already run; `step.compute` saved their earlier values, and the
repro holds them. Nothing in a repro is ever modified: a replay runs on `copy_model()`, which has its own weights,
buffers, gradients and attributes, and is not compiled.

On disk it has the files of `saved_step.py`. A model that is built from the run's configuration and loaded from them
computes the same bits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.buffers import names_of_constants
from stabletrain.checkpoint.tree import Tree, unflatten
from stabletrain.forensics.probes.update import UpdateFault
from stabletrain.forensics.rerun import copy_of_model, is_compiled, is_scaled, with_loss_scale
from stabletrain.forensics.saved_step import (
    BATCH,
    FORMAT,
    STATE,
    STEP,
    checked_reading,
    put_,
    read,
    tensors_of,
    write_step,
)
from stabletrain.forensics.user_code import hashes
from stabletrain.guard.checks.recheck import Finding
from stabletrain.guard.policy import NoGuard
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch, RankPart, Reading
from stabletrain.stored.json_files import DamagedFile
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
    older: Callable[[], Tree | None] = lambda: None
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


def save_repro(folder: Path, repro: Repro) -> None:
    """Writes a repro, without `older` and `fresh`, into `folder`, which is created if necessary.

    `step.json` is written last: a folder without it is incomplete.

    Raises:
        OSError: the disk is full or gone.
        TypeError: `metadata` holds anything except dicts with str keys, lists, str, bool, int, float and None.
    """
    model, batch = repro.model, repro.batch
    kept = tensors_in(batch)
    order = {name: dims_by_stride(tensor) for name, tensor in kept.items()}
    # Keep the memory layout: the choice of kernel, and so the bits, depends on it.
    laid_out = {name: tensor.permute(order[name]) for name, tensor in kept.items()}
    about = {
        "format": FORMAT,
        "step": repro.step,
        "micro_batches": repro.micro_batches,
        "sizes": [*batch.sizes],
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


def tensors_in(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name."""
    kept = {"inputs": batch.inputs, "targets": batch.targets, "ids": batch.ids}
    return {name: tensor for name, tensor in kept.items() if tensor is not None}


def dims_by_stride(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor in memory order, outermost first."""
    return sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))


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
    # A constant follows from the model's options: its table may have another layout than when this was recorded.
    constant = names_of_constants(model)
    written, recorded = (
        {name: each for name, each in of.items() if name not in constant} for of in (buffers, state["buffers"])
    )
    put_(written, recorded, folder, strict)
    try:
        laid_out = {name: kept[name].permute(inverse_permutation(order)) for name, order in found["order"].items()}
        batch = Batch(laid_out["inputs"], laid_out["targets"], laid_out.get("ids"), found["sources"])
        batch = replace(batch, sizes=tuple(found.get("sizes", ())))
        reading, part, loss_scale = unflatten([found["reading"], found.get("part"), found["loss_scale"]], {})
        reading = None if reading is None else checked_reading(reading)
        part = None if part is None else RankPart(**part)
        rest = [found[key] for key in ("scaled", "micro_batches", "compiled", "about")]
        if not isinstance(loss_scale, int | float):
            raise TypeError(f"loss_scale is {loss_scale!r}, not a number")
        even = 1 <= rest[1] <= max(len(batch), 1) and not len(batch) % rest[1]
        if sum(batch.sizes) != len(batch) if batch.sizes else not even:
            raise ValueError(f"{rest[1]} micro-batches {batch.sizes or ''} of a batch of {len(batch)} samples")
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


def inverse_permutation(order: Sequence[int]) -> list[int]:
    """The inverse permutation."""
    return sorted(range(len(order)), key=lambda place: order[place])
