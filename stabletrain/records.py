"""The data types that the parts of the package pass to each other. This file imports nothing from the package."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

IGNORE_INDEX = -100
"""Targets with this value are ignored; PyTorch's default `ignore_index`."""

LOGITS_AT_ONCE = 2**26
"""Default number of logits upcast to fp32 at once: 256 MiB."""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

LARGEST = 3.4e38
"""Just below fp32's maximum, so that `value <= LARGEST` is False for NaN and for Inf."""

Number = Tensor | float
"""A number of a step: 0-d on the device, or a float if the host knows it. A known number costs no kernel."""


@dataclass(frozen=True)
class Transform:
    """A transform that the device still has to apply to a batch's inputs, such as cropping and normalising images.

    Attributes:
        apply: returns the inputs for the model, from the batch's inputs and `each` on the same device. It must be a
            pure function that treats each sample independently.
        each: the numbers that `apply` needs for each sample, `[batch, ...]`, such as where to crop.
    """

    apply: Callable[[Tensor, Tensor], Tensor]
    each: Tensor


ORDERED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, *INTEGERS)
"""Dtypes whose smallest and largest value can be read."""


class Range(NamedTuple):
    """Smallest and largest value of a tensor, read on the host: the device then need not look for bad values.

    Attributes:
        low, high: the values, NaN if one is NaN. A part of the tensor may have a smaller range.
        count: number of values that were read.
        tensor: the tensor that was read, or a copy or a part of it.
        version: of that tensor, which counts writes: a range says nothing about a tensor that was written since.
    """

    low: float
    high: float
    count: int
    tensor: Tensor
    version: int

    def bounds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor's values are known to lie in this range."""
        return self.tensor is tensor and self.version == tensor._version

    def moved(self, before: Tensor, after: Tensor) -> Range | None:
        """Returns the range of a copy or a part of a tensor; None if this is not the range of that tensor."""
        return self._replace(tensor=after, version=after._version) if self.bounds(before) else None


def range_of(tensor: Tensor, values: Tensor) -> Range | None:
    """Returns the range of a tensor on the host, from those of its values that count; None if it has no order."""
    if tensor.dtype not in ORDERED or tensor.layout != torch.strided or tensor.is_inference():
        return None
    low, high = values.aminmax() if values.numel() else torch.zeros(2)
    return Range(low.item(), high.item(), values.numel(), tensor, tensor._version)


@dataclass(frozen=True)
class Batch:
    """A batch or micro-batch of samples.

    Attributes:
        inputs: `[batch, time]` int64 tokens or `[batch, channels, height, width]` float32 images. A user's model and
            data may agree on anything else whose first dimension is the batch. With a `transform`, its arguments.
        targets: int64 class or next-token ids, `[batch]` or `[batch, time]`, of which `IGNORE_INDEX` is ignored; or, if
            the objective takes them, floats of any shape whose first dimension is the batch: all of them count.
        ids: int64 `[batch]` on the CPU, the samples' indices in the data set; None if unknown.
        sources: for each sample one line that says where it came from (file and offset); None if unknown.
        counted: number of valid targets in the whole batch, if it is known; a rank's shard of a batch needs it.
        transform: is applied to the inputs when the batch is moved to the model's device; None if they are complete.
        share: share of the step's samples that this part of its batch holds, over all ranks and micro-batches.
        sizes: number of samples of each micro-batch, if samples were left out; empty if all have the same number.
        input_range: of the inputs; None if unknown.
        target_range: of the targets that are not `IGNORE_INDEX`; (0, 0) if there are none, None if unknown.
    """

    inputs: Tensor
    targets: Tensor
    ids: Tensor | None = None
    sources: Sequence[str] | None = None
    counted: int | None = None
    transform: Transform | None = None
    share: float = 1.0
    sizes: tuple[int, ...] = ()
    input_range: Range | None = None
    target_range: Range | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return self.inputs.shape[0]

    def to(self, device: torch.device) -> Batch:
        """Moves the batch to `device`, and applies the transform there; see `moved`."""
        return self.moved(device).transformed()

    def moved(self, device: torch.device) -> Batch:
        """Moves all tensors that the step needs to `device`.

        From pinned memory the copy is asynchronous. Before the targets leave the host, counts the valid ones: on the
        device this would take several kernels.
        """
        leaves, counted = self.targets.device.type == "cpu" and device.type != "cpu", self.known_count()
        counted = self.count_targets() if leaves and counted is None else counted
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in (self.inputs, self.targets))
        transform = self.transform
        if transform is not None:
            transform = replace(transform, each=transform.each.to(device, non_blocking=True))
        elif inputs is self.inputs and targets is self.targets:
            return self
        return self.holding(inputs, targets, counted=counted, transform=transform)

    def examined(self) -> Batch:
        """Reads the ranges of tensors on the host; leaves those on a device unread."""
        inputs, targets = self.inputs, self.targets
        if inputs.device.type != "cpu" or targets.device.type != "cpu":
            return self
        target_range = range_of(targets, targets)
        if target_range is not None and target_range.low < 0 and not targets.is_floating_point():
            target_range = range_of(targets, targets[targets != IGNORE_INDEX])
        return replace(
            self,
            # inputs that a transform will change say nothing about those that the model gets
            input_range=range_of(inputs, inputs) if self.transform is None else None,
            target_range=target_range,
        )

    def holding(self, inputs: Tensor, targets: Tensor, **others: Any) -> Batch:
        """Returns the batch with copies or parts of its inputs and targets, whose values lie in the same ranges."""
        ranges = (self.input_range, self.inputs, inputs), (self.target_range, self.targets, targets)
        mine, theirs = (known and known.moved(before, after) for known, before, after in ranges)
        others |= {"inputs": inputs, "targets": targets, "input_range": mine, "target_range": theirs}
        return replace(self, **others)

    def transformed(self) -> Batch:
        """Applies the transform, if there is one, on the device that holds the inputs."""
        if self.transform is None:
            return self
        each = self.transform.each.to(self.inputs.device, non_blocking=True)
        return replace(self, inputs=self.transform.apply(self.inputs, each), transform=None)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that `moved` moves."""
        return [self.inputs, self.targets, *([] if self.transform is None else [self.transform.each])]

    @property
    def units(self) -> int:
        """Number of tokens, or of samples if there is one class or a vector of numbers for each."""
        return len(self) if self.targets.is_floating_point() else self.targets.numel()

    def count_targets(self) -> int:
        """Returns the number of valid targets; waits for the device if they are on one."""
        return self.targets.numel() if self.targets.is_floating_point() else int((self.targets != IGNORE_INDEX).sum())

    def known_count(self) -> int | None:
        """Returns the number of valid targets of the batch, or of that of which it is a shard; None if unknown."""
        if self.counted is None and self.target_range is not None and self.target_range.bounds(self.targets):
            return self.target_range.count
        return self.counted

    def n_valid(self) -> Tensor:
        """Returns the number of valid targets, at least 1, 0-d on their device; does not wait for it."""
        if self.targets.is_floating_point():
            return torch.full((), max(self.targets.numel(), 1), device=self.targets.device)
        return (self.targets != IGNORE_INDEX).sum().clamp(min=1)

    def pin_memory(self) -> Batch:
        """Copies the batch to pinned memory; a batch that is on a card already is returned as it is."""
        if self.inputs.is_cuda:
            return self
        transform = self.transform
        if transform is not None:
            transform = replace(transform, each=transform.each.pin_memory())
        return self.holding(self.inputs.pin_memory(), self.targets.pin_memory(), transform=transform)

    def split(self, parts: int) -> list[Batch]:
        """Splits the batch into `parts` micro-batches of equal size, in order; or into those of `sizes`.

        Raises:
            ValueError: the batch size is not a multiple of `parts`.
        """
        if self.sizes:
            ends = [*itertools.accumulate(self.sizes)]
            found = [self.rows(slice(end - size, end)) for size, end in zip(self.sizes, ends, strict=True)]
            return [part.of_step(self.share * len(part) / len(self)) for part in found]
        size, rest = divmod(len(self), parts)
        if rest:
            raise ValueError(f"a batch of {len(self)} samples does not divide into {parts} micro-batches")
        if parts == 1:
            return [self]
        whole = replace(self, share=self.share / parts, counted=self.known_count())
        cut = [whole.rows(slice(i * size, (i + 1) * size)) for i in range(parts)]
        return [whole.holding(*part.tensors()[:2], **part.of_samples()) for part in cut]

    def of_samples(self) -> dict[str, Any]:
        """Returns the fields, besides inputs and targets, that say something about each sample."""
        return {"ids": self.ids, "sources": self.sources, "transform": self.transform}

    def without(self, left_out: Collection[int], parts: int) -> Batch:
        """Leaves samples out of the batch of a step with `parts` micro-batches; one that loses all its samples ends.

        The targets of the whole step and `share` are the caller's to correct: other ranks may lose samples too.
        """
        kept = [row for row in range(len(self)) if row not in left_out]
        size = len(self) // parts
        sizes = [sum(row // size == part for row in kept) for part in range(parts)]
        return replace(self.rows(kept), sizes=tuple(filter(None, sizes)))

    def rows(self, rows: slice | list[int]) -> Batch:
        """Selects samples."""
        sources = self.sources
        if sources is not None:
            sources = sources[rows] if isinstance(rows, slice) else [sources[row] for row in rows]
        return Batch(
            self.inputs[rows],
            self.targets[rows],
            None if self.ids is None else self.ids[rows],
            sources,
            self.counted,
            None if self.transform is None else replace(self.transform, each=self.transform.each[rows]),
            self.share,
        )

    def shard(self, rows: slice) -> Batch:
        """Selects one rank's samples of a whole batch, marked with the whole batch's number of valid targets."""
        part = self.rows(rows)
        return part.of_step(len(part) / max(len(self), 1)).counting(self.count_targets())

    def counting(self, targets: int) -> Batch:
        """Marks the batch as a shard of a batch with `targets` valid targets."""
        return replace(self, counted=targets)

    def having(self, inputs: Tensor, targets: Tensor) -> Batch:
        """Returns the batch with other inputs and targets, such as sanitized ones."""
        if inputs is self.inputs and targets is self.targets:
            return self
        return replace(self, inputs=inputs, targets=targets)

    def of_step(self, share: float) -> Batch:
        """Marks the batch as this share of the step's samples."""
        return replace(self, share=share)


def reads_rows(data: Any) -> bool:
    """Whether a data set can read some samples of a batch: it has a method `rows(step, size, split, rows)`.

    A class that inherits `rows` and overrides `batch` cannot: the inherited `rows` knows nothing of its `batch`.
    """
    places = [vars(data) if hasattr(data, "__dict__") else {}, *(vars(kind) for kind in type(data).__mro__)]
    nearest = next((place for place in places if "rows" in place or "batch" in place), {})
    return "rows" in nearest and callable(data.rows)


@dataclass(frozen=True)
class LossTerms:
    """A micro-batch's share of the step's loss, and the terms it consists of.

    Each number is divided by the step's number of valid targets, so the shares of all micro-batches add up to the mean
    over the step.

    Attributes:
        total: the loss, which is differentiated; 0-d fp32.
        parts: terms to log, by name: `ce` and `zloss` for the cross-entropy. A name is the same in every step.
    """

    total: Tensor
    parts: Mapping[str, Number] = field(default_factory=dict)

    def __add__(self, other: LossTerms) -> LossTerms:
        names = {**self.parts, **other.parts}
        parts = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names}
        return LossTerms(self.total + other.total, parts)

    def detach(self) -> LossTerms:
        """Detaches the terms from the autograd graph."""
        parts = {name: part.detach() if isinstance(part, Tensor) else part for name, part in self.parts.items()}
        return LossTerms(self.total.detach(), parts)


@dataclass(frozen=True)
class GradNorms:
    """L2 norms of the unscaled gradients, before clipping.

    Attributes:
        total: 0-d fp32, over all parameters.
        each: fp32 `[parameters with a gradient]`, in the order of `model.parameters()`.
        sharded: in a user's own loop, for each of `each` of a shard, 1 / number of ranks with the same one; else 0.
    """

    total: Tensor
    each: Tensor
    sharded: Sequence[float] = ()


ScaleUpdate = Callable[[Callable[[], Tensor], Tensor], Tensor]
"""Returns the factor of a whole update, in (0, 1], 0-d fp32. Takes the gate, and before it a function that computes the
norm of the update over the learning rate."""


@dataclass(frozen=True)
class Clipped:
    """The effect of clipping on a step; tensors are fp32.

    Attributes:
        coef: gradient norm after clipping over the norm before; 1 if nothing was clipped.
        active: clipped share, in [0, 1], of the units this option clips (tensors, rows, values). None if the unit is
            the whole gradient, which is clipped where `coef` is below 1.
        scale_update: None unless the update is clipped in place of gradients; `coef` is then that of the update's
            norm, and becomes known in the optimizer's step.
    """

    coef: Number
    active: Number | None = None
    scale_update: ScaleUpdate | None = None


class OwnNumbers(NamedTuple):
    """What one of several ranks measured of its own part of a step; 0-d fp32 tensors on the device.

    Attributes:
        loss: this rank's share of the step's loss: its sum, divided by the number of valid targets of the whole batch.
        grad_norm: DDP: norm of this rank's gradients before they are averaged, times the loss scale and the world size.
            FSDP: norm of this rank's shards of the step's gradient.
    """

    loss: Tensor
    grad_norm: Tensor


@dataclass(frozen=True)
class StepChecks:
    """Faults of a step that loss and gradients do not show; tensors are fp32.

    Attributes:
        bad_data: 1 if the batch held values that no model can learn from, else 0; see `stability/sanitize.py`.
        inputs: largest magnitude of the inputs; 0 for integers.
        buffers: L2 norm of the model's floating-point buffers after the forward pass (BatchNorm's statistics).
        recheck: how far the gradient differs from a second computation, relative, or over its limit if that is learnt;
            below 0 if memory did not suffice for it. See `guard/checks/recheck.py`.
        stop: bool, whether any rank was asked to stop; None in a single process.
        state_changed: 1 if weights, moments or buffers are not what the last update left, else 0.
        rank: first rank whose own shard of the step was bad, -1 for none; None in a single process.
        own: this rank's own numbers; None in a single process. They stay on this rank, for forensics.
        unproven: in a user's own loop, 1 if some rank has to check the update after it, else 0; None in the trainer.
    """

    bad_data: Number
    inputs: Number
    buffers: Number
    state_changed: Number = 0.0
    recheck: Number = 0.0
    stop: Tensor | None = None
    rank: Tensor | None = None
    own: OwnNumbers | None = None
    unproven: Number | None = None


@dataclass(frozen=True)
class DeviceReading:
    """The numbers of one step before they are on the host; the fields are those of `Reading`, except `withheld`.

    Attributes:
        clip_active: None if the gradient was clipped as a whole; see `Clipped`.
        withheld: 1 if the gate was closed, so that the optimizer's step did nothing, else 0.
    """

    step: int
    loss: Number
    terms: Mapping[str, Number]
    grad_norm: Number
    clip_coef: Number
    clip_active: Number | None
    inputs: Number
    buffers: Number
    loss_scale: Number
    withheld: Number
    bad_data: Number
    overflow: Number
    lr: float
    state_changed: Number = 0.0
    bad_update: Number = 0.0
    recheck: Number = 0.0
    recheck_update: Number = 0.0
    stop: Number = 0.0
    rank: Number = -1
    update: Number = 0.0
    weights: Number = 0.0


class Reading(NamedTuple):
    """The numbers of one step, on the host: everything that the loop, the guard and the trackers know about it.

    Attributes:
        step: number of the step, counted from 1.
        loss: mean over the step; nats per target for the cross-entropy.
        terms: the terms of the loss that the objective names, such as `ce` and `zloss`.
        grad_norm: L2 norm over all parameters, before clipping.
        clip_coef, clip_active: see `Clipped`.
        inputs, buffers, bad_data: see `StepChecks`.
        loss_scale: fp16's loss scale in this step; 1 in other precisions.
        applied: whether the update reached the weights.
        overflow: whether the update was skipped for fp16's routine overflow, which lowers the loss scale.
        lr: learning rate of the first parameter group.
        state_changed: see `StepChecks`.
        bad_update: whether the optimizer's step gave values that are not finite; `applied` is then False.
        recheck: see `StepChecks`.
        recheck_update: the same for the optimizer's update of one tensor.
        stop: whether any rank was asked to stop.
        rank: first rank whose own shard of the step was bad; -1 for none, and in a single process.
        update, weights: see `monitors/update_length.py`; 0 if they are not measured.
    """

    step: int
    loss: float
    terms: Mapping[str, float]
    grad_norm: float
    clip_coef: float
    clip_active: float
    inputs: float
    buffers: float
    loss_scale: float
    applied: bool
    bad_data: bool
    overflow: bool
    lr: float
    state_changed: bool = False
    bad_update: bool = False
    recheck: float = 0.0
    recheck_update: float = 0.0
    stop: bool = False
    rank: int = -1
    update: float = 0.0
    weights: float = 0.0


def saved_reading(saved: Mapping[str, Any]) -> Reading:
    """Returns the reading that an incident holds; incidents of older versions have only the cross-entropy's terms."""
    known: dict[str, Any] = dict(saved)
    known.setdefault("terms", {name: known.pop(name) for name in ("ce", "zloss") if name in known})
    return Reading(**known)


class RankPart(NamedTuple):
    """One rank's own part of a step, on the host, in the units in which a replay of this part measures it.

    Attributes:
        rank: the rank.
        loss: nats per target, mean over the rank's own part of the batch.
        grad_norm: L2 norm of this loss's gradient, before clipping; None if unknown, as with FSDP.
        shard_norm: FSDP: L2 norm of the rank's shards of the whole step's gradient; None if gradients are not sharded.
    """

    rank: int
    loss: float
    grad_norm: float | None = None
    shard_norm: float | None = None


class Verdict(enum.Enum):
    """What the loop does after a step.

    `RESTORE`: memory or arithmetic failed, not the data or the settings. The step is repeated from an intact state,
    with the same batch and the same learning rate.
    `KEEP`: a few samples are at fault. The step is taken again without them (`guard/guilty.py`).
    """

    APPLY = "apply"
    SKIP = "skip"
    KEEP = "keep"
    RESTORE = "restore"
    ROLLBACK = "rollback"
    HALT = "halt"


@dataclass(frozen=True)
class RollbackPlan:
    """How a run continues after a rollback.

    Attributes:
        number: which rollback of the run this is, from 1.
        skip_batches: batches to skip in addition to those that were read since the restored state.
        lr_factor: factor of the learning rate until step `until`.
        until: see `lr_factor`.
    """

    number: int
    skip_batches: int
    lr_factor: float
    until: int


@dataclass
class TrainState:
    """The state in which a step starts. State and step number determine the step completely.

    Attributes:
        model: the network, with fp32 parameters (bf16 matrices with precision=bf16_params).
        optimizer: with its moments and step counters.
        step: number of steps done; the next step looks up its batch under this number.
        skipped: ranges `[start, stop)` of data positions that are never read; see `data/order.py`.
        executed_steps: steps executed in the whole run, including rolled back ones; it never decreases.
        options: the optimizer's original arguments in each parameter group. Some optimizers count there (Prodigy,
            schedule-free ones): a value that differs from its original is such a count, and belongs to the state.
        tensors: the model's tensors (`model_tensors.py`), kept here so that no step walks the tree of modules.
        counts: numbers of valid targets, as 0-d tensors on the device.
        average: the weights averaged over time (an `Average` of `stability/averaging.py`); None without `averaging`.
    """

    model: nn.Module
    optimizer: Optimizer
    step: int = 0
    skipped: list[tuple[int, int]] = field(default_factory=list)
    executed_steps: int = 0
    options: list[dict[str, Any]] = field(init=False)
    tensors: Any = field(default=None, init=False, repr=False, compare=False)
    counts: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    average: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        known, simple = self.optimizer.defaults, bool | int | float | str | None
        self.options = [
            {key: value for key, value in group.items() if key in known and isinstance(value, simple)}
            for group in self.optimizer.param_groups
        ]
