"""One training step: forward, backward, unscale, measure, judge, clip, and apply the update or not.

A step is a pure function of (state, step number): the batch is looked up by number, the randomness is seeded by number,
and a skipped step changes nothing. It has two halves:

- `compute` runs forward and backward. It writes gradients and buffers (BatchNorm's statistics), never weights.
- `commit` judges the step, clips, and applies the update; or it skips the update and restores the buffers.

Between the two halves the loop reads the numbers of the *previous* step. If that step was skipped, the weights still
have the values it started from, so it can be replayed. Nothing here waits for the device.
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
    """What `compute` hands to `commit`.

    Attributes:
        terms, norms: losses and gradient norms, on the device.
        checks: the other quantities that the guard judges.
        saved_buffers: copies of the model's buffers from before the forward pass.
        classes: size of the logits' last dimension; None if every micro-batch was empty.
    """

    terms: LossTerms
    norms: GradNorms
    checks: StepChecks
    saved_buffers: list[Tensor]
    classes: int | None


class InFlight:
    """A reading on its way from the device to the host."""

    def __init__(self, step: int, lr: float, values: Tensor) -> None:
        """Starts copying `values` to the host: fp32 `[12]`, or `[14]` on several ranks, in the order of `Reading`."""
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
        """Returns the reading. On CUDA this waits for the copy only, not for work launched after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values = self._values.tolist()
        measured, (applied, bad_data, overflow), of_ranks = values[:9], values[9:12], values[12:]
        reading = Reading(self._step, *measured, bool(applied), bool(bad_data), bool(overflow), self._lr)  # ty: ignore[invalid-argument-type]
        return reading._replace(stop=bool(of_ranks[0]), rank=int(of_ranks[1])) if of_ranks else reading


def compute(state: TrainState, batches: Sequence[Batch], tools: Tools) -> Computed:
    """Runs forward and backward over the micro-batches of step `state.step`; leaves unscaled gradients in `.grad`.

    On several ranks the returned numbers are those of the whole step, equal on every rank.

    Args:
        state: where the step starts; its weights are not changed.
        batches: micro-batches on the model's device.
        tools: everything that acts in a step.
    """
    # Seed by step number, so that a replay of this step draws the same random numbers.
    tools.determinism.seed_step(tools.seed, state.step)
    state.optimizer.zero_grad(set_to_none=True)
    # The forward pass overwrites BatchNorm's statistics. If the step is skipped, these copies are restored.
    saved_buffers = save_buffers(state.model)
    # Divide each micro-batch's loss by the number of targets of the whole step: the losses then add up to the exact
    # mean, even if micro-batches or ranks have different numbers of valid targets.
    targets_in_step = count_targets(batches)
    n_valid = targets_in_step.clamp(min=1)
    losses, bad, largest, classes = [], [targets_in_step == 0], [], None
    model = tools.wrap(state.model)
    for number, batch in enumerate(batches, 1):
        if batch.targets.numel() == 0:  # an empty micro-batch; `numel` is known on the host, so there is no wait
            continue
        # A token id out of range would crash a CUDA kernel and the process. Replace it, and mark the step as bad.
        inputs, magnitude, bad_inputs = tools.sanitizer.inputs(batch.inputs)
        with tools.parallel.gradient_sync(state.model, number == len(batches)):
            # Forward, under autocast. (With `loss_chunk` the head runs together with the loss.)
            with tools.precision.autocast():
                logits = model(inputs)
            # A user's model may return anything. The objective reports it if this has no shape.
            classes = shape[-1] if (shape := getattr(logits, "shape", ())) else 0
            targets, bad_targets = tools.sanitizer.targets(batch.targets, classes)
            # Loss in fp32: bf16 has 8 bits of precision, too few for a logsumexp over a vocabulary.
            loss = tools.objective(logits, targets, n_valid)
            # Backward, times the loss scale, so that small fp16 gradients do not underflow.
            tools.scale(loss.total).backward()
        losses.append(loss.detach())
        bad += [bad_inputs, bad_targets]
        largest.append(magnitude)
    if not losses:
        losses = [zero_gradients_(state.model)]
        largest = [torch.zeros_like(losses[0].total)]
    terms = sum(losses[1:], losses[0])
    # Undo the loss scale first, so that norms and clipping bounds mean the same in every precision.
    tools.precision.unscale_(gradients(state.model))
    tools.parallel.average_buffers_(state.model, saved_buffers)
    tools.parallel.max_over_ranks_(tools.after_update.maxima(state.model))
    # Measure before clipping: norm clipping would turn every gradient into NaN if one of them is.
    checks = StepChecks(torch.stack(bad).any(), torch.stack(largest).amax(), buffer_norm(state.model))
    # After this all-gather every rank has the numbers of the whole step, so all ranks reach the same verdict.
    terms, norms, checks = tools.parallel.reduce_stats(terms, measure(state.model), checks)
    return Computed(terms, norms, checks, saved_buffers, classes)


def count_targets(batches: Sequence[Batch]) -> Tensor:
    """Number of valid targets in the whole step, including other ranks; 0-d int64."""
    if (known := batches[0].counted) is not None:
        return torch.full((), known, device=batches[0].targets.device)
    return torch.stack([(batch.targets != IGNORE_INDEX).sum() for batch in batches]).sum()


def zero_gradients_(model: nn.Module) -> LossTerms:
    """Sets every gradient to 0, and returns a loss of 0: the step of an empty batch."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    zero = torch.zeros((), device=next(model.parameters()).device)
    return LossTerms(zero, zero, zero)


def commit(state: TrainState, computed: Computed, tools: Tools) -> InFlight:
    """Judges the step, clips, applies the update or skips it, and counts the step."""
    terms, norms = computed.terms, computed.norms
    # Judge. The gate is a bool on the device, so the host does not wait. It closes for bad data, for NaN or Inf, for a
    # spike, and for fp16's routine overflow.
    overflow = tools.precision.overflow(terms, norms)
    gate = tools.guard.gate(terms, norms, computed.checks) & ~overflow
    # Clip. Adaptive clipping needs the gate: a skipped step must not enter its statistics.
    clipped = tools.clipping(state.model, norms, gate)
    loss_scale = tools.precision.loss_scale()
    lr = set_lr(state.optimizer, tools.learning_rate(state.step) * tools.guard.lr_multiplier(state.step))
    # Apply the update if the gate is open. Otherwise weights and moments keep their bits, and buffers are restored.
    apply(state.optimizer, gate)
    tools.after_update(state.model, gate)
    restore_buffers(state.model, computed.saved_buffers, gate)
    tools.precision.update(overflow, gate)
    # Count the step, skipped or not: the next step reads the next batch.
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
    """Runs one whole step and waits for its reading."""
    return commit(state, compute(state, batches, tools), tools).wait()


def set_lr(optimizer: Optimizer, factor: float) -> float:
    """Sets the learning rate of every parameter group to `factor` times its peak; returns the first group's."""
    for group in optimizer.param_groups:
        group.setdefault("peak_lr", group["lr"])
        group["lr"] = group["peak_lr"] * factor
    return optimizer.param_groups[0]["lr"]


def apply(optimizer: Optimizer, gate: Tensor) -> None:
    """Runs the optimizer's step if `gate` (0-d bool) is open; otherwise changes no bit."""
    # Multiplying the update by 0 would not work: 0 * NaN is NaN. A fused optimizer takes the gate as `found_inf`, and
    # then leaves parameters, moments and step counters alone. Any other optimizer costs one host read.
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, (~gate).float()  # ty: ignore[missing-attribute]
        optimizer.step()
    elif gate.item():
        optimizer.step()


def save_buffers(model: nn.Module) -> list[Tensor]:
    """Copies the model's buffers, in order."""
    buffers = [*model.buffers()]
    # One vector for each dtype: a ResNet has a hundred buffers, and copying each would launch a hundred kernels.
    copies: dict[int, Tensor] = {}
    for alike in by_dtype(buffers):
        copies |= zip(map(id, alike), split_like(flatten_all(alike), alike), strict=True)
    return [copies[id(buffer)] for buffer in buffers]


@torch.no_grad()
def restore_buffers(model: nn.Module, held: list[Tensor], gate: Tensor) -> None:
    """Restores the buffers that the forward pass wrote (BatchNorm's statistics) if the gate is closed."""
    buffers = [*model.buffers()]
    before = dict(zip(map(id, buffers), held, strict=True))
    for alike in by_dtype(buffers):
        then = [before[id(buffer)] for buffer in alike]
        torch._foreach_copy_(alike, split_like(torch.where(gate, flatten_all(alike), flatten_all(then)), alike))


def flatten_all(tensors: list[Tensor]) -> Tensor:
    """Concatenates tensors of one dtype into one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def split_like(vector: Tensor, alike: list[Tensor]) -> list[Tensor]:
    """Splits a vector from `flatten_all` into views with the shapes of the tensors in `alike`."""
    parts = vector.split([tensor.numel() for tensor in alike])
    return [part.view(tensor.shape) for part, tensor in zip(parts, alike, strict=True)]


def by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by dtype."""
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in {tensor.dtype for tensor in tensors}]
