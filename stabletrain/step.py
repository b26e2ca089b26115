"""One training step: forward, backward, unscale, measure, judge, clip, apply or not.

A step is a pure function of (state, step number): the batches are looked up by number, the randomness is seeded by
number, and an update whose gate is closed changes nothing. It has two halves:

- `compute` runs forward and backward. It touches gradients and buffers (BatchNorm's statistics), never weights.
- `commit` judges, clips, and applies the update, or puts the buffers back.

Between the two the loop reads what the *previous* step measured, and the weights are still exactly what a withheld
step started from. Nothing here waits for the device, so on CUDA the reading costs no bubble.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.monitors.tensor_norms import buffer_norm, gradients, measure
from stabletrain.protocols import Tools
from stabletrain.records import IGNORE_INDEX, Batch, GradNorms, LossTerms, Reading, StepChecks, TrainState


@dataclass(frozen=True)
class Computed:
    """What `compute` leaves for `commit`.

    Attributes:
        terms, norms: losses and gradient norms, on the device.
        checks: what else the guard looks at.
        saved_buffers: the model's buffers as they were before.
        classes: the last dimension of the logits; None if nothing could be run.
    """

    terms: LossTerms
    norms: GradNorms
    checks: StepChecks
    saved_buffers: list[Tensor]
    classes: int | None


class InFlight:
    """A reading on its way from the device to the host."""

    def __init__(self, step: int, lr: float, values: Tensor) -> None:
        """Starts the copy of `values`, fp32 `[12]` (on several ranks `[14]`) in `Reading`'s order; returns at once."""
        self._step, self._lr = step, lr
        self._arrived = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._values = values

    def wait(self) -> Reading:
        """The reading; on CUDA this waits for the copy, not for the work launched after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values = self._values.tolist()
        measured, (applied, bad_data, overflow), of_ranks = values[:9], values[9:12], values[12:]
        reading = Reading(self._step, *measured, bool(applied), bool(bad_data), bool(overflow), self._lr)  # ty: ignore[invalid-argument-type]
        return reading._replace(stop=bool(of_ranks[0]), rank=int(of_ranks[1])) if of_ranks else reading


def compute(state: TrainState, batches: Sequence[Batch], tools: Tools) -> Computed:
    """Forward and backward over the micro-batches of step `state.step`; leaves unscaled gradients in `.grad`.

    On several ranks the numbers that come out are those of the whole step, and the same on every rank.

    Args:
        state: what the step starts from; its weights are not touched.
        batches: micro-batches on the model's device.
        tools: everything that acts.
    """
    # Seed by the step's number, so that the step can be executed again, bit for bit.
    tools.determinism.seed_step(tools.seed, state.step)
    state.optimizer.zero_grad(set_to_none=True)
    # Forward overwrites BatchNorm's statistics; a withheld step gets them back.
    saved_buffers = save_buffers(state.model)
    # Each micro-batch's loss is divided by the targets of the whole step, so the sum is the mean over the step.
    targets_in_step = count_targets(batches)
    n_valid = targets_in_step.clamp(min=1)
    losses, bad, largest, classes = [], [targets_in_step == 0], [], None
    model = tools.wrap(state.model)
    for number, batch in enumerate(batches, 1):
        if batch.targets.numel() == 0:  # nothing to run; this is a shape, so the host does not wait
            continue
        # An id out of range would crash a kernel and end the process: it is replaced, and the step marked as bad.
        inputs, magnitude, bad_inputs = tools.sanitizer.inputs(batch.inputs)
        with tools.parallel.gradient_sync(state.model, number == len(batches)):
            # Forward, under autocast. With `loss_chunk` the head runs later, with the loss.
            with tools.precision.autocast():
                logits = model(inputs)
            # A model of the user's may return anything; the objective refuses what has no shape.
            classes = shape[-1] if (shape := getattr(logits, "shape", ())) else 0
            targets, bad_targets = tools.sanitizer.targets(batch.targets, classes)
            # Loss, in fp32.
            loss = tools.objective(logits, targets, n_valid)
            # Backward, at the loss scale.
            tools.scale(loss.total).backward()
        losses.append(loss.detach())
        bad += [bad_inputs, bad_targets]
        largest.append(magnitude)
    if not losses:
        losses = [zero_gradients_(state.model)]
        largest = [torch.zeros_like(losses[0].total)]
    terms = sum(losses[1:], losses[0])
    tools.precision.unscale_(gradients(state.model))
    tools.parallel.average_buffers_(state.model, saved_buffers)
    tools.parallel.max_over_ranks_(tools.after_update.maxima(state.model))
    # Measure before anything is clipped: `clip_grad_norm_` turns every gradient into NaN if one of them is.
    checks = StepChecks(torch.stack(bad).any(), torch.stack(largest).amax(), buffer_norm(state.model))
    # From here on every rank has the numbers of the whole step, so all ranks judge alike.
    terms, norms, checks = tools.parallel.reduce_stats(terms, measure(state.model), checks)
    return Computed(terms, norms, checks, saved_buffers, classes)


def count_targets(batches: Sequence[Batch]) -> Tensor:
    """How many targets of the whole step count, those of other ranks included; 0-d int64."""
    if (known := batches[0].counted) is not None:
        return torch.full((), known, device=batches[0].targets.device)
    return torch.stack([(batch.targets != IGNORE_INDEX).sum() for batch in batches]).sum()


def zero_gradients_(model: nn.Module) -> LossTerms:
    """The loss of no sample at all: 0, and every gradient is 0."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    zero = torch.zeros((), device=next(model.parameters()).device)
    return LossTerms(zero, zero, zero)


def commit(state: TrainState, computed: Computed, tools: Tools) -> InFlight:
    """Judges what `compute` found, clips, applies the update or leaves everything as it was, and counts the step."""
    terms, norms = computed.terms, computed.norms
    # The gate stays on the device. It closes for NaN or Inf, for a spike, and for fp16's routine overflow.
    overflow = tools.precision.overflow(terms, norms)
    gate = tools.guard.gate(terms, norms, computed.checks) & ~overflow
    # Clipping knows the gate: a withheld step must not enter its statistics.
    clipped = tools.clipping(state.model, norms, gate)
    loss_scale = tools.precision.loss_scale()
    lr = set_lr(state.optimizer, tools.learning_rate(state.step) * tools.guard.lr_multiplier(state.step))
    # Update the weights if the gate is open; otherwise nothing changes, and the buffers go back.
    apply(state.optimizer, gate)
    tools.after_update(state.model, gate)
    restore_buffers(state.model, computed.saved_buffers, gate)
    tools.precision.update(overflow, gate)
    # A withheld step counts as well: the next batch is next.
    state.step += 1
    state.executed_steps += 1
    measured = (
        *(terms.total, terms.ce, terms.zloss, norms.total, clipped.coef, clipped.active),
        *(computed.checks.inputs, computed.checks.buffers),
        *(loss_scale, gate, computed.checks.bad_data, overflow),
        *(value for value in (computed.checks.stop, computed.checks.rank) if value is not None),
    )
    return InFlight(state.step, lr, torch.stack([value.float() for value in measured]))


def train_step(state: TrainState, batches: Sequence[Batch], tools: Tools) -> Reading:
    """One whole step, and its reading."""
    return commit(state, compute(state, batches, tools), tools).wait()


def set_lr(optimizer: Optimizer, factor: float) -> float:
    """Sets every group's learning rate to `factor` times its peak; returns the first group's."""
    for group in optimizer.param_groups:
        group.setdefault("peak_lr", group["lr"])
        group["lr"] = group["peak_lr"] * factor
    return optimizer.param_groups[0]["lr"]


def apply(optimizer: Optimizer, gate: Tensor) -> None:
    """Takes the optimizer's step where `gate` (0-d bool) is open; where it is closed, nothing at all changes.

    A fused optimizer withholds the update on the device: `found_inf` leaves parameters, moments and step counters as
    they are. Another optimizer costs one host read. Multiplying the update by 0 would not do: 0 * NaN is NaN.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, (~gate).float()  # ty: ignore[missing-attribute]
        optimizer.step()
    elif gate.item():
        optimizer.step()


def save_buffers(model: nn.Module) -> list[Tensor]:
    """Copies of the model's buffers, in order; those of one dtype lie in one piece of memory, so few kernels run."""
    buffers = [*model.buffers()]
    copies: dict[int, Tensor] = {}
    for alike in by_dtype(buffers):
        copies |= zip(map(id, alike), split_like(flatten_all(alike), alike), strict=True)
    return [copies[id(buffer)] for buffer in buffers]


@torch.no_grad()
def restore_buffers(model: nn.Module, held: list[Tensor], gate: Tensor) -> None:
    """Puts back the buffers that the forward pass of a withheld step has written (BatchNorm's statistics)."""
    buffers = [*model.buffers()]
    before = dict(zip(map(id, buffers), held, strict=True))
    for alike in by_dtype(buffers):
        then = [before[id(buffer)] for buffer in alike]
        torch._foreach_copy_(alike, split_like(torch.where(gate, flatten_all(alike), flatten_all(then)), alike))


def flatten_all(tensors: list[Tensor]) -> Tensor:
    """Copies of tensors of one dtype, one after the other in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def split_like(vector: Tensor, alike: list[Tensor]) -> list[Tensor]:
    """The parts of such a vector, in the tensors' shapes."""
    parts = vector.split([tensor.numel() for tensor in alike])
    return [part.view(tensor.shape) for part, tensor in zip(parts, alike, strict=True)]


def by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The tensors, those of each dtype together."""
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in {tensor.dtype for tensor in tensors}]
