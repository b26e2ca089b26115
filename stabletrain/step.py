"""One training step: forward, backward, unscale, measure, judge, clip, and apply the update or not.

A step is a pure function of (state, step number): the batch is looked up by number, the randomness is seeded by number,
and a skipped step changes nothing. It has two halves:

- `compute` runs forward and backward. It writes gradients and buffers (BatchNorm's statistics), never weights.
- `commit` judges the step, clips, and applies the update; or it skips the update and restores the buffers.

Between the two halves the loop reads the numbers of the *previous* step. If that step was skipped, the weights still
have the values it started from, so it can be replayed. Nothing here waits for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.buffers import Buffers, SavedBuffers, buffers_of
from stabletrain.in_flight import InFlight
from stabletrain.model_tensors import tensors_of
from stabletrain.monitors.tensor_norms import gradients, measure_all
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import (
    IGNORE_INDEX,
    Batch,
    Clipped,
    DeviceReading,
    GradNorms,
    LossTerms,
    Number,
    Reading,
    ScaleUpdate,
    StepChecks,
    TrainState,
)
from stabletrain.stability.optimizers.gated import GatedOptimizer
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.tools import Tools


@dataclass(frozen=True)
class Computed:
    """The results of `compute`, for `commit`.

    Attributes:
        terms, norms: losses and gradient norms, on the device.
        checks: the other quantities that the guard judges.
        buffers: the model's buffers, after the forward pass.
        saved_buffers: copies of their values from before it.
        forwards: number of forward passes; 0 if every micro-batch was empty.
        classes: number of classes of the targets; None if unknown, or if targets are no class ids.
    """

    terms: LossTerms
    norms: GradNorms
    checks: StepChecks
    buffers: Buffers
    saved_buffers: SavedBuffers
    forwards: int
    classes: int | None


def compute(state: TrainState, batches: Sequence[Batch], tools: Tools) -> Computed:
    """Runs forward and backward over the micro-batches of step `state.step`; leaves unscaled gradients in `.grad`.

    On several ranks the returned numbers are those of this rank's part of the step.

    Args:
        state: where the step starts; its weights are not changed.
        batches: micro-batches on the model's device.
        tools: everything that acts in a step.
    """
    # Seed by step number, so that a replay of this step draws the same random numbers.
    tools.determinism.seed_step(tools.seed, state.step)
    state.optimizer.zero_grad(set_to_none=True)
    # The model's tensors were found at the first step; this notices whether it has got others since.
    state.tensors = tensors = tensors_of(state.model)
    # The forward pass overwrites BatchNorm's statistics. If the step is skipped, these copies are restored.
    saved_buffers = buffers_of(state.model, tensors).save()
    # Every `guard.recheck_every` steps, the first micro-batch runs a second time: its gradient must be the same.
    recheck = tools.guard.recheck.of_step(state, saved_buffers, tools)
    # Divide each micro-batch's loss by the number of targets of the whole step: the losses then add up to the exact
    # mean, even if micro-batches or ranks have different numbers of valid targets.
    n_valid, empty = count_targets(batches, state.counts)
    losses, bad, largest, classes = [], [empty], [], None
    model = tools.wrap(state.model)
    alone = tools.wrap_alone(state.model)
    full = [batch for batch in batches if batch.targets.numel()]  # known on the host, so there is no wait
    for number, batch in enumerate(full, 1):
        with tools.parallel.gradient_sync(state.model, number == len(full)):
            done = forward_backward(model, batch, n_valid, tools)
        recheck.gradient(partial(forward_backward, alone, n_valid=n_valid, tools=tools), batch, done.loss.total)
        losses.append(done.loss)
        bad.append(done.bad_data)
        largest.append(done.largest)
        classes = done.classes
    forwards = len(losses)
    if not losses:
        losses = [zero_gradients_(state.model)]
    terms = sum(losses[1:], losses[0])
    # Undo the loss scale first, so that norms and clipping bounds mean the same in every precision.
    tensors.find()
    found = gradients(tensors)
    tools.precision.unscale_(found)
    tools.parallel.average_buffers_(state.model, saved_buffers)
    tools.parallel.max_over_ranks_(tools.after_update.maxima(state.model))
    # Measure before clipping: norm clipping would turn every gradient into NaN if one of them is.
    buffers = buffers_of(state.model, tensors)
    norms, buffer_norm = measure_all(found, buffers.judged)
    checks = StepChecks(maximum(bad), maximum(largest), buffer_norm, recheck=recheck.difference)
    return Computed(terms, norms, checks, buffers, saved_buffers, forwards, classes)


class ForwardBackward(NamedTuple):
    """The results of a micro-batch's forward and backward pass, besides gradients; tensors are on the device.

    Attributes:
        loss: the micro-batch's share of the step's loss.
        bad_data: whether the micro-batch holds values that no model can learn from; a bool if the host knows it.
        largest: largest magnitude of its inputs.
        classes: see `Computed`.
    """

    loss: LossTerms
    bad_data: Tensor | bool
    largest: Number
    classes: int | None


def forward_backward(model: Callable[[Tensor], Any], batch: Batch, n_valid: Tensor, tools: Tools) -> ForwardBackward:
    """Runs forward and backward of a micro-batch; adds scaled gradients to `.grad`."""
    # A token id out of range would crash a CUDA kernel and the process. Replace it, and mark the step as bad.
    inputs, magnitude, bad_inputs = tools.sanitizer.inputs(batch.inputs, batch.input_range)
    # Forward, under autocast. (With `loss_chunk` the head runs together with the loss.)
    with tools.precision.autocast():
        outputs = model(inputs)
    classes = tools.objective.classes(outputs)
    targets, bad_targets = tools.sanitizer.targets(batch.targets, classes, batch.target_range)
    # Loss in fp32: bf16 has 8 bits of precision, too few for a logsumexp over a vocabulary.
    loss = tools.objective(outputs, batch.having(inputs, targets), n_valid)
    # Backward, times the loss scale, so that small fp16 gradients do not underflow.
    tools.scale(loss.total).backward()
    return ForwardBackward(loss.detach(), bad_inputs | bad_targets, magnitude, classes)


MOST_COUNTS = 64
"""Number of counts of targets that are kept on the device."""


def count_targets(batches: Sequence[Batch], earlier: dict[int, Tensor] | None = None) -> tuple[Tensor, Tensor | bool]:
    """Counts the valid targets of the whole step, including other ranks.

    Args:
        earlier: counts of earlier steps, on the device. Most steps have as many, which then costs no kernel.

    Returns:
        their number, at least 1, 0-d int64 on the device; and whether there are none: a 0-d bool, or False.
    """
    known = batches[0].known_count() if len(batches) == 1 else batches[0].counted
    if known is None and batches[0].targets.is_floating_point():  # all of them count, so the host knows how many
        known = sum(batch.targets.numel() for batch in batches)
    if known is not None:
        number, earlier = max(known, 1), {} if earlier is None else earlier
        if number not in earlier:
            if len(earlier) == MOST_COUNTS:
                earlier.clear()
            earlier[number] = torch.full((), number, device=batches[0].targets.device)
        n_valid = earlier[number]
        return n_valid, torch.ones_like(n_valid, dtype=torch.bool) if known == 0 else False
    counts = [(batch.targets != IGNORE_INDEX).sum() for batch in batches]
    count = sum(counts[1:], counts[0])
    return count.clamp(min=1), count == 0


def maximum(numbers: Sequence[Tensor | float]) -> Number:
    """Returns the largest of 0-d tensors and host numbers that are at least 0, as fp32; NaN propagates.

    A float if there are no tensors.
    """
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    known = max((float(number) for number in numbers if not isinstance(number, Tensor)), default=0.0)
    if not tensors:
        return known
    largest = (torch.stack(tensors).amax() if len(tensors) > 1 else tensors[0]).float()
    return largest.clamp(min=known) if known else largest


def zero_gradients_(model: nn.Module) -> LossTerms:
    """Sets every gradient to 0, and returns a loss of 0: the step of an empty batch."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    zero = torch.zeros((), device=next(model.parameters()).device)
    return LossTerms(zero)


def commit(state: TrainState, computed: Computed, tools: Tools) -> InFlight:
    """Judges the step, clips, applies the update or skips it, and counts the step."""
    # Self-check: only gradients and buffers may have changed since the last update. A difference is a memory fault.
    state_check = tools.guard.state_check
    changed = state_check.before_update(state, computed.saved_buffers)
    # Judge, with the numbers of the whole step. The gate is a bool on the device, so the host does not wait. It closes
    # for bad data, for NaN or Inf, for a spike, and for fp16's routine overflow.
    checks = replace(computed.checks, state_changed=changed)
    gated = close_gate(computed.terms, computed.norms, checks, tools.parallel, tools.precision, tools.guard.gate)
    gate, loss_scale = gated.gate, tools.precision.loss_scale()
    # The schedule's learning rate for this step number; lower for some steps after a rollback.
    lr = tools.learning_rate.set_(state.optimizer.param_groups, state.step, tools.guard.lr_multiplier(state.step))
    # If the optimizer may give a bad update, copy everything that it may write, before gradients are clipped.
    update = CheckedUpdate(state, tools)
    # Clip. Adaptive clipping needs the gate: a skipped step must not enter its statistics.
    clipped = tools.clipping(state.model, gated.norms, gate)
    # Apply the update if the gate is open. Otherwise weights and moments keep their bits.
    withheld = update.apply(gate, clipped.scale_update)
    tools.after_update(state.model, gate)
    # Finite gradients do not make a finite update. From here on the gate is also closed if the update was bad: it is
    # undone here, or by the loop. Then restore the buffers if the gate is closed, and adapt fp16's loss scale.
    gate = update.judge(gate)
    buffers = computed.buffers.restore_(computed.saved_buffers, gate)
    tools.precision.update(gated.overflow, gate)
    # Average the weights over time. A skipped step or an undone update must not enter.
    tools.averaging(state, gate)
    # Count the step, skipped or not: the next step reads the next batch.
    state.step += 1
    state.executed_steps += 1
    state_check.after_update(state, buffers)
    # Copy the step's numbers to the host, without waiting for them.
    numbers = gated.numbers(
        state.step,
        clipped,
        loss_scale=loss_scale,
        lr=lr,
        withheld=withheld,
        bad_update_rank=update.finite.rank,
        bad_update=update.finite.bad,
        recheck_update=update.recheck,
        **update.lengths,
    )
    return InFlight(numbers, gated.checks.own, update.finite.undone, tools.parallel.wait_for)


@dataclass(frozen=True)
class Gated:
    """A judged step: its numbers, the same on every rank, and whether its update is safe.

    Attributes:
        terms, norms, checks: of the whole step.
        overflow: whether the gradients overflowed as they routinely do in fp16: a bool, or 0-d.
        gate: whether the update is to be applied; 0-d bool on the device.
    """

    terms: LossTerms
    norms: GradNorms
    checks: StepChecks
    overflow: Tensor | bool
    gate: Tensor

    def numbers(
        self, step: int, clipped: Clipped, *, bad_update_rank: Tensor | None = None, **others: Any
    ) -> DeviceReading:
        """Collects the numbers that the host reads.

        Args:
            step: number of the step, counted from 1.
            bad_update_rank: first rank with a bad update, -1 for none; None in a single process.
            others: loss scale, learning rate, and what is known of the update.
        """
        checks, rank = self.checks, self.checks.rank
        if bad_update_rank is not None and rank is not None:  # a rank with bad numbers has no update
            rank = torch.maximum(rank, bad_update_rank)
        return DeviceReading(
            step=step,
            loss=self.terms.total,
            terms=self.terms.parts,
            grad_norm=self.norms.total,
            clip_coef=clipped.coef,
            clip_active=clipped.active,
            inputs=checks.inputs,
            buffers=checks.buffers,
            bad_data=checks.bad_data,
            overflow=self.overflow,
            state_changed=checks.state_changed,
            recheck=checks.recheck,
            stop=False if checks.stop is None else checks.stop,
            rank=-1 if rank is None else rank,
            **others,
        )


def close_gate(
    terms: LossTerms,
    norms: GradNorms,
    checks: StepChecks,
    parallel: SingleProcess,
    precision: FullPrecision,
    opens: Callable[[LossTerms, GradNorms, StepChecks], Tensor],
) -> Gated:
    """Judges a step before its update: closes the gate if the update is not safe. Does not wait for the device.

    Args:
        terms, norms, checks: of this rank's part of the step; gradients are unscaled and not clipped.
        parallel: the ranks that judge together.
        precision: knows which overflows are routine.
        opens: the guard's rule for the gate.
    """
    # Agree: after this all-gather every rank has the numbers of the whole step, so all ranks reach the same verdict.
    terms, norms, checks = parallel.reduce_stats(terms, norms, checks)
    # An overflow that only lowers the loss scale closes the gate too, but it is no fault.
    overflow = precision.overflow(terms, norms)
    gate = precision.close(opens(terms, norms, checks), overflow)
    return Gated(terms, norms, checks, overflow, gate)


class CheckedUpdate:
    """An optimizer's step with the guard's self-checks around it.

    Attributes:
        finite: whether the update was finite on all ranks; see `guard/checks/update_check.py`.
        recheck: how far the update of one tensor differs from a second computation; see `guard/checks/recheck.py`.
        lengths: lengths of the update and of the weights; see `monitors/update_length.py`.
    """

    def __init__(self, state: TrainState, tools: Tools) -> None:
        """Copies what is needed to undo the update, if it is checked; call it before gradients are clipped."""
        self._state, self._tools = state, tools
        self.finite = tools.guard.update_check.of_step(state, tools)
        self.recheck: Number = 0.0
        self.lengths: Mapping[str, Tensor] = {}

    def apply(self, gate: Tensor, scale: ScaleUpdate | None = None) -> Tensor:
        """Applies the update; if it is this step's turn, applies that of one tensor again to copies. See `apply`."""
        state, guard = self._state, self._tools.guard
        repeat = guard.recheck.of_update(state, self._tools.parallel)
        self._before = guard.lengths.before(state.model)
        withheld = apply(state.optimizer, gate, scale)
        self.recheck = repeat.update(partial(apply, gate=gate, scale=scale))
        return withheld

    def judge(self, gate: Tensor) -> Tensor:
        """Judges and measures the update; returns the gate of everything that follows it."""
        gate = self.finite.judge(gate)
        self.lengths = self._tools.guard.lengths.after(self._before)
        return gate


def train_step(state: TrainState, batches: Sequence[Batch], tools: Tools) -> Reading:
    """Runs one whole step and waits for its reading."""
    return commit(state, compute(state, batches, tools), tools).wait()


def apply(optimizer: Optimizer, gate: Tensor, scale: ScaleUpdate | None = None) -> Tensor:
    """Runs the optimizer's step if `gate` (0-d bool) is open; otherwise changes no bit.

    Args:
        scale: clips the update; only for a `GatedOptimizer`.

    Returns:
        1 if the update was withheld, else 0; 0-d fp32.
    """
    # Multiplying the update by 0 would not work: 0 * NaN is NaN. A fused optimizer takes the gate as `found_inf`, and
    # then leaves parameters, moments and step counters alone. Any other optimizer costs one host read.
    withheld = torch.logical_not(gate, out=torch.empty((), device=gate.device))  # one kernel for `(~gate).float()`
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, withheld  # ty: ignore[missing-attribute]
        if isinstance(optimizer, GatedOptimizer):
            optimizer.scale_update = scale
        optimizer.step()
    elif gate.item():
        optimizer.step()
    return withheld
