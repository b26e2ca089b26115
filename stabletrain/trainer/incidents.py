"""A step of the trainer as the engine sees it: what an investigation gets, and how the step is computed again."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabletrain.buffers import SavedBuffers
from stabletrain.forensics.facts import same_bits
from stabletrain.forensics.handler import IncidentSummary
from stabletrain.forensics.investigate import IncidentRequest
from stabletrain.forensics.probes.samples import MAX_LISTED, bad_samples, identity_of
from stabletrain.forensics.probes.update import UpdateFault, update_fault
from stabletrain.forensics.repro import Repro
from stabletrain.forensics.rerun import copy_of_model, with_loss_scale
from stabletrain.forensics.subject import StepSubject
from stabletrain.guard.checks.comparing import Compared, sums
from stabletrain.guard.checks.recheck import NoRecheck, repeats_exactly
from stabletrain.guard.guilty import Counts, Sample
from stabletrain.guard.read_step import ReadStep
from stabletrain.in_flight import InFlight
from stabletrain.machine.compiling import compiled_shape, uncompiled
from stabletrain.machine.determinism import rng_restored
from stabletrain.monitors.tensor_norms import gradients
from stabletrain.parallel.owners import without_owners
from stabletrain.records import Batch, Reading, TrainState
from stabletrain.step import Computed, apply, close_gate, compute, count_targets, forward_backward
from stabletrain.tools import Tools
from stabletrain.trainer.run import TrainingRun

UNUSED_BATCHES = 1_000_003
"""A replay reads its fresh batch at this multiple of the step number, a position that the run never reaches."""


class ExecutedStep(NamedTuple):
    """A committed step, with what is needed to investigate it.

    Attributes:
        in_flight: the step's reading, on its way to the host.
        batch: the step's batch, on the host.
        classes: number of classes of the targets; None if unknown, or if targets are no class ids.
        saved_buffers: copies of the model's buffers before the step; the next forward pass overwrites the live ones.
    """

    in_flight: InFlight
    batch: Batch
    classes: int | None
    saved_buffers: SavedBuffers

    def reading(self) -> Reading:
        """Waits for the step's reading and returns it."""
        return self.in_flight.wait()


class StepOfRun(ReadStep):
    """A step of the trainer: its batch is known, and it is computed again by `step.compute`.

    Attributes:
        run, executed: the step and its run.
    """

    def __init__(self, run: TrainingRun, executed: ExecutedStep) -> None:
        reading = executed.reading()
        super().__init__(
            reading,
            reading.step,
            run.state.executed_steps,
            run.state,
            run.device,
            run.tools.guard,
            run.parallel,
            run.tracker,
            run.forensics.handler,
        )
        self.run, self.executed = run, executed

    def investigate(self, kind: str, reading: Reading) -> IncidentSummary | None:
        """See `ReadStep`."""
        run, model = self.run, self.state.model
        # Under FSDP an investigation needs the whole weights, of this step and of an older one that still was healthy.
        states = run.parallel.whole_state(
            model, lambda: run.saved.snapshots.newest(reading.step - 2), run.forensics.model_factory
        )
        request = IncidentRequest(
            kind,
            optimizer=self.state.optimizer if run.parallel.has_whole_moments else None,
            limits=self.guard.bounds,
            classes=self.executed.classes,
            tick=self.tick,
        )
        return self.handler.handle(request, lambda: StepSubject(make_repro(run, self.executed, reading)), states)

    def bad_samples(self, most: int | None = MAX_LISTED) -> tuple[list[dict[str, Any]], int]:
        """See `ReadStep`."""
        batch, mine = self.executed.batch, []
        with suppress(Exception):  # a user's batch may hold anything, and the other ranks wait
            vocab_size = self.run.tools.sanitizer.vocab_size
            mine = bad_samples(transformed(batch, self.device), vocab_size, self.executed.classes, most)
        return mine, len(batch)

    def can_be_repeated(self) -> bool:
        """See `ReadStep`."""
        return repeats_exactly(self.state.model, self.device)

    def differs_when_repeated(self, cause: str | None) -> bool:
        """Computes the step again. The gradients of the next step, if it has been computed, are lost."""
        computed = self._compute_again(self._micro_batches())
        terms, norms, _ = self.parallel.reduce_stats(computed.terms, computed.norms, computed.checks)
        loss, norm = torch.stack([terms.total, norms.total]).float().tolist()
        return not (same_bits(loss, self.reading.loss) and same_bits(norm, self.reading.grad_norm))

    def update_again(self) -> None:
        """See `ReadStep`."""
        apply(self.state.optimizer, torch.ones((), dtype=torch.bool, device=self.device))

    def gradient_again(self, compared: Compared) -> Tensor | None:
        """Computes the first micro-batch again, on a copy of the model, which is never compiled."""
        model, tools = self.state.model, self.run.tools
        if compiled_shape(model) is not None:
            return None
        tools = replace(tools, precision=with_loss_scale(tools.precision, self.reading.loss_scale))
        model = copy_of_model(model)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), self.executed.saved_buffers.tensors(), strict=True):
                buffer.copy_(before)
        batches = self._micro_batches()
        n_valid, _ = count_targets(batches)
        first = next(batch for batch in batches if batch.targets.numel())
        assert compared.generators is not None
        with rng_restored(model), uncompiled(), torch.enable_grad():
            compared.generators.set()
            forward_backward(tools.wrap_alone(model), first, n_valid, tools)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return sums([gradients[name] for name in compared.names], self.device)

    def sample_counts(self) -> Counts:
        """See `ReadStep`. Every rank has as many."""
        parts = self.run.plan.grad_accum_steps
        return [[len(self.executed.batch) // parts] * parts] * self.parallel.ranks.world_size

    def is_sound_without(self, left_out: Collection[Sample]) -> bool:
        """See `ReadStep`. The gradients of the next step, if it has been computed, are lost."""
        batches = self.without(left_out).to(self.device).split(self.run.plan.grad_accum_steps)
        try:
            computed = self._compute_again(batches)
        except Exception:  # for example, BatchNorm rejects a single value
            if self.parallel.ranks.distributed:  # the other ranks wait
                raise
            return False
        tools, found = self.run.tools, (computed.terms, computed.norms, computed.checks)
        return bool(close_gate(*found, self.parallel, tools.precision, self.guard.gate).gate)

    def without(self, left_out: Collection[Sample]) -> Batch:
        """Returns this rank's batch without these samples of the step, on the host; all ranks must call it."""
        batch, ranks, parts = self.executed.batch, self.parallel.ranks, self.run.plan.grad_accum_steps
        size = len(batch) // parts
        mine = {each.micro_batch * size + each.row for each in left_out if each.rank == ranks.rank}
        kept = batch.without(mine, parts)
        # The loss is divided by the targets that are left on all ranks.
        if batch.counted is not None:
            counted = torch.tensor(kept.count_targets(), device=self.device)
            kept = kept.counting(int(self.parallel.all_reduce_sum(counted)))
        return kept.of_step(len(kept) / (len(batch) * ranks.world_size - len(left_out)))

    def names_of(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """See `ReadStep`: with their ids and sources."""
        batch, ranks = self.executed.batch, self.parallel.ranks
        size = len(batch) // self.run.plan.grad_accum_steps
        rows = [each.micro_batch * size + each.row for each in samples if each.rank == ranks.rank]
        return self.parallel.gather_samples([{"index": row, **identity_of(batch, row)} for row in rows], len(batch))

    def _compute_again(self, batches: Sequence[Batch]) -> Computed:
        """Runs forward and backward of the step on these micro-batches; only gradients change."""
        state, executed = self.state, self.executed
        executed.saved_buffers.put_back()
        executed.in_flight.recomputed = True
        state.step -= 1  # the step is counted already, and its randomness is seeded by its number
        try:
            return compute(state, batches, self.run.tools)
        finally:
            state.step += 1
            executed.saved_buffers.put_back()

    def _micro_batches(self) -> list[Batch]:
        """Returns the step's micro-batches on the device."""
        return self.executed.batch.to(self.device).split(self.run.plan.grad_accum_steps)


def make_repro(run: TrainingRun, executed: ExecutedStep, reading: Reading) -> Repro:
    """Collects what a replay of the step needs, without communication: the model may still be sharded.

    A skipped step has left the state unchanged, so the replay starts from exactly that state. An applied step has
    overwritten the state it started from, so its batch is replayed on the updated weights and buffers.
    """
    model = run.state.model
    return Repro(
        model=model,
        buffers=[*model.buffers()] if reading.applied else executed.saved_buffers.tensors(),
        step=reading.step - 1,
        batch=transformed(executed.batch, run.device),
        micro_batches=run.plan.grad_accum_steps,
        tools=run.tools,
        loss_scale=reading.loss_scale,
        device=run.device,
        reading=reading,
        part=run.parallel.rank_part(
            executed.in_flight.own, run.tools.objective.own_factor(executed.batch), reading.loss_scale
        ),
        compiled_for=compiled_shape(model),
        changes=run.tools.guard.state_check.changes(model) if reading.state_changed else (),
        update=repeat_of_update(run.state, run.device, reading),
        applied=reading.applied,
        recheck=run.tools.guard.recheck.found,
        fresh=lambda: transformed(run.data.load(UNUSED_BATCHES * (reading.step + 1)), run.device),
        metadata=run.forensics.metadata,
    )


def repeat_of_update(
    state: TrainState, device: torch.device, reading: Reading
) -> Callable[[], UpdateFault | None] | None:
    """Returns a function that repeats a bad update and names its fault; None if the update was not bad."""
    if not reading.bad_update:
        return None
    if reading.applied:  # the step was repeated, and its second update was finite
        return lambda: None
    opened = torch.ones((), dtype=torch.bool, device=device)

    def explain() -> UpdateFault | None:
        with without_owners(state.optimizer):  # another rank may fail to record its update, and so not be there
            return update_fault(state.model, state.optimizer, lambda: apply(state.optimizer, opened))

    return explain


def transformed(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch with its transform applied: on the device, as in training, so that the bits are the same."""
    return batch if batch.transform is None else batch.to(device).to(torch.device("cpu"))


def rehearse(recheck: NoRecheck, first: int, steps: int) -> None:
    """Repeats one of the first steps of this process, if a later one will be repeated: no other needs more memory.

    Args:
        first: number of the process's first step, counted from 0.
        steps: number of steps of the run.
    """
    if recheck.every and steps // recheck.every > first // recheck.every:
        recheck.rehearse(max(first, 1))  # the first step of a run has no moments yet


def compute_twice(state: TrainState, micro_batches: Sequence[Batch], tools: Tools, device: torch.device) -> Computed:
    """Runs forward and backward of a step twice, and closes its gate unless all gradients have the same bits.

    Where bits may differ it runs them once: the step's recheck, which is due again, compares with a limit.
    """
    first = compute(state, micro_batches, tools)
    if tools.guard.recheck.varies or not repeats_exactly(state.model, device):
        return first
    bits = sums(gradients(state.model), device)
    first.saved_buffers.put_back(first.buffers)
    computed = compute(state, micro_batches, tools)
    differs = (bits != sums(gradients(state.model), device)).any().float()
    tools.parallel.max_over_ranks_([differs])
    difference = torch.where(differs > 0, math.inf, computed.checks.recheck)
    return replace(computed, checks=replace(computed.checks, recheck=difference))
