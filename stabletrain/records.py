"""The nouns of a training step: what is passed between the rooms, and nothing that acts.

This file imports nothing of the package, so every room may see it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

IGNORE_INDEX = -100
"""A target of this value is not counted: PyTorch's own default for `ignore_index`."""

LOGITS_AT_ONCE = 2**26
"""Most logits that are widened to fp32 together, where nothing else is asked for: 256 MiB."""


@dataclass(frozen=True)
class Batch:
    """One batch, or one micro-batch, of samples.

    Attributes:
        inputs: `[batch, time]` int64 tokens or `[batch, channels, height, width]` float32 images; a plug-in's
            model and data may agree on anything whose first dimension is the batch.
        targets: int64 class or next-token ids, `[batch]` or `[batch, time]`; `IGNORE_INDEX` is not counted.
        ids: int64 `[batch]` on the CPU: which samples of the data set these are; None if the data cannot say.
        sources: one line a sample saying where it came from (file and offset); None if the data cannot say.
        counted: how many targets count in the whole batch of which this is one rank's part; None for a whole batch.
    """

    inputs: Tensor
    targets: Tensor
    ids: Tensor | None = None
    sources: Sequence[str] | None = None
    counted: int | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return self.inputs.shape[0]

    def to(self, device: torch.device) -> Batch:
        """The same batch with inputs and targets on `device`; pinned memory is copied without waiting."""
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which a copy to a card does not wait; on a card it stays."""
        if self.inputs.is_cuda:
            return self
        return replace(self, inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())

    def split(self, parts: int) -> list[Batch]:
        """`parts` micro-batches of equal size, in order.

        Raises:
            ValueError: the batch does not divide into `parts`.
        """
        size, rest = divmod(len(self), parts)
        if rest:
            raise ValueError(f"a batch of {len(self)} samples does not divide into {parts} micro-batches")
        return [self.rows(slice(i * size, (i + 1) * size)) for i in range(parts)]

    def rows(self, rows: slice) -> Batch:
        """Some of the samples."""
        return Batch(
            self.inputs[rows],
            self.targets[rows],
            None if self.ids is None else self.ids[rows],
            None if self.sources is None else self.sources[rows],
            self.counted,
        )

    def counting(self, targets: int) -> Batch:
        """The same as a part of a batch in which so many targets count."""
        return replace(self, counted=targets)


@dataclass(frozen=True)
class LossTerms:
    """The parts of the loss as 0-d fp32 tensors on the device, each already divided by the step's valid targets.

    Micro-batches therefore simply add up to the mean over the step, however unevenly targets are ignored.

    Attributes:
        total: what is differentiated, `ce + zloss`.
        ce: cross-entropy, nats per target.
        zloss: the z-loss with its coefficient.
    """

    total: Tensor
    ce: Tensor
    zloss: Tensor

    def __add__(self, other: LossTerms) -> LossTerms:
        return LossTerms(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def detach(self) -> LossTerms:
        """The same values without their graph."""
        return LossTerms(*(getattr(self, f.name).detach() for f in fields(self)))


@dataclass(frozen=True)
class GradNorms:
    """L2 norms of the raw gradients: unscaled, before clipping.

    Attributes:
        total: 0-d fp32, over all parameters.
        each: fp32 `[parameters with a gradient]`, in the order of `model.parameters()`.
    """

    total: Tensor
    each: Tensor


@dataclass(frozen=True)
class Clipped:
    """What clipping did to a step's gradients; 0-d fp32 tensors on their device.

    Attributes:
        coef: norm after over norm before; 1 where nothing was clipped.
        active: share, in [0, 1], of what this kind clips one by one (the whole gradient, tensors, rows, values) that
            was clipped.
    """

    coef: Tensor
    active: Tensor


@dataclass(frozen=True)
class StepChecks:
    """What can go wrong in a step that loss and gradients do not show; 0-d tensors on the device.

    Attributes:
        bad_data: bool, whether the batch held what no model can learn from; see `stability/sanitize.py`.
        inputs: fp32, the largest magnitude of the inputs; 0 where they are whole numbers.
        buffers: fp32, L2 norm of the model's floating-point buffers after the forward pass (BatchNorm's statistics).
        stop: bool, whether a rank has been asked to stop; None for one process.
        rank: the first rank whose own part of the step was bad, -1 for none; None for one process.
    """

    bad_data: Tensor
    inputs: Tensor
    buffers: Tensor
    stop: Tensor | None = None
    rank: Tensor | None = None


class Reading(NamedTuple):
    """What one step measured, as floats on the host: the only thing the loop, the guard and the trackers see.

    Attributes:
        step: number of the step, counted from 1: so many steps are done when this one is.
        loss, ce, zloss: nats per target, mean over the step.
        grad_norm: L2 norm over all parameters, before clipping.
        clip_coef: gradient norm after clipping over before; 1 where clipping was not active.
        clip_active: share, in [0, 1], of what the clipping clips one by one that it did clip.
        inputs, buffers: largest magnitude of the inputs, and norm of the buffers; see `StepChecks`.
        loss_scale: fp16's loss scale the step ran with; 1 in other precisions.
        applied: whether the gate was open, so that the update reached the weights.
        bad_data: whether the batch held what no model can learn from; see `stability/sanitize.py`.
        overflow: whether it was withheld by fp16's routine overflow, which calibrates the loss scale.
        lr: learning rate of the first parameter group.
        stop: whether one of several ranks has been asked to stop.
        rank: the first rank whose own part of the step was bad; -1 where none was, or there is one process.
    """

    step: int
    loss: float
    ce: float
    zloss: float
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
    stop: bool = False
    rank: int = -1


class Verdict(enum.Enum):
    """What the loop does about a reading."""

    APPLY = "apply"
    SKIP = "skip"
    ROLLBACK = "rollback"
    HALT = "halt"


@dataclass(frozen=True)
class Detour:
    """How a run goes on after a rollback.

    Attributes:
        number: of the rollback, from 1.
        skip_batches: batches to pass over beyond those read since the state that was put back.
        lr_factor: what the learning rate is multiplied by, up to step `until`.
        until: see `lr_factor`.
    """

    number: int
    skip_batches: int
    lr_factor: float
    until: int


@dataclass
class TrainState:
    """Everything a step starts from; with the step's number it determines the step.

    Attributes:
        model: the network, parameters in fp32 (with precision=bf16_params its matrices in bf16).
        optimizer: its moments and step counters.
        step: steps done, which is also the number, counted from 0, under which the next one looks up its batch.
        skipped: ranges `[start, stop)` of data positions that are never read; see `data/order.py`.
        executed_steps: steps executed in the whole run, those that were rolled back included: it never goes back.
    """

    model: nn.Module
    optimizer: Optimizer
    step: int = 0
    skipped: list[tuple[int, int]] = field(default_factory=list)
    executed_steps: int = 0
