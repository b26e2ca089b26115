"""Finds bad samples of a batch: invalid values, and samples that make the step non-finite.

`bad_samples` checks the values of the batch on the host. `find_by_bisection` runs the step with parts of the batch.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.forensics.facts import Culprits
from stabletrain.forensics.replay import forward_backward
from stabletrain.forensics.repro import Repro
from stabletrain.monitors.forward import isolated
from stabletrain.records import IGNORE_INDEX, Batch, LossTerms
from stabletrain.stability.objective import Objective
from stabletrain.stability.step_tools import StepTools
from stabletrain.tools import Tools

MAX_LISTED = 8
"""Maximum number of samples to list."""


def bad_samples(
    batch: Batch, vocab_size: int | None, classes: int | None, most: int | None = MAX_LISTED
) -> list[dict[str, Any]]:
    """Returns the samples that `stability/sanitize.py` rejects, in batch order.

    Args:
        batch: on any device.
        vocab_size: upper bound of integer inputs; None if unknown.
        classes: upper bound of the targets; None if unknown.
        most: how many to return at most; None for all.

    Returns:
        for each sample its `index` in the batch, its `id` and `source` (file and offset) if the data provides them, the
        `fault` (input, label, ignored, empty), and a description `what`. A fault of the whole batch has index None.
    """
    if batch.targets.numel() == 0:
        return [{"index": None, "fault": "empty", "what": "the batch is empty"}]
    batch, found = replace(batch, inputs=batch.inputs.cpu(), targets=batch.targets.cpu()), []
    for index in range(len(batch)):
        for fault, what in (
            ("input", bad_input(batch.inputs[index], vocab_size)),
            ("label", bad_label(batch.targets[index], classes)),
        ):
            if what:
                found.append({"index": index, **identity_of(batch, index), "fault": fault, "what": what})
                break
    if not found and not batch.counted and not batch.count_targets():
        what = f"every target is {IGNORE_INDEX}, so all are ignored"
        found = [{"index": None, **identity_of(batch, 0), "fault": "ignored", "what": what}]
    return found[:most]


def identity_of(batch: Batch, index: int) -> dict[str, Any]:
    """Id and source of a sample, if the data provides them."""
    found: dict[str, Any] = {}
    with suppress(IndexError, TypeError, ValueError):  # malformed ids or sources must not end the run
        found |= {} if batch.ids is None else {"id": int(batch.ids[index])}
        found |= {} if batch.sources is None else {"source": str(batch.sources[index])}
    return found


def bad_input(inputs: Tensor, vocab_size: int | None) -> str:
    """Describes what is wrong with a sample's input; empty if nothing is."""
    if inputs.is_floating_point():
        bad = ~torch.isfinite(inputs)
        if bool(bad.any()):
            holds = f"input holds {int(bad.sum())} of {inputs.numel()} values that are NaN or Inf"
            return f"{holds}, the first{first_place(bad)}"
    elif vocab_size is not None:
        bad = (inputs < 0) | (inputs >= vocab_size)
        if bool(bad.any()):
            return f"token {int(inputs[bad][0])}{first_place(bad)} is outside [0, {vocab_size})"
    return ""


def bad_label(targets: Tensor, classes: int | None) -> str:
    """Describes what is wrong with a sample's targets; empty if nothing is."""
    if targets.is_floating_point():
        bad = ~torch.isfinite(targets)
        if bool(bad.any()):
            return f"target {float(targets[bad][0])}{first_place(bad)} is not a finite number"
        bad = (targets < 0) | (targets > (classes or 0) - 1) if classes is not None else torch.zeros_like(bad)
        return f"target {float(targets[bad][0]):.4g}{first_place(bad)} is outside [0, 1]" if bool(bad.any()) else ""
    if classes is None:
        return ""
    bad = ((targets < 0) | (targets >= classes)) & (targets != IGNORE_INDEX)
    return f"target {int(targets[bad][0])}{first_place(bad)} is outside [0, {classes})" if bool(bad.any()) else ""


def sample_sizes(values: Tensor) -> list[float]:
    """Returns the largest magnitude of each sample, in fp32; nothing for integers."""
    if not values.is_floating_point() or not values.numel():
        return []
    return values.detach().abs().reshape(len(values), -1).amax(1).float().tolist()


def first_place(bad: Tensor) -> str:
    """Index of the first bad value in the sample, ` at [0, 3, 5]`; empty for a scalar."""
    place = bad.nonzero()[0].tolist()
    return f" at {place}" if place else ""


def describe(samples: Sequence[Mapping[str, Any]], batch: str = "the batch") -> str:
    """Describes the first bad sample in one line, and counts the others; indices refer to `batch`."""
    if not samples:
        return "all samples are valid on the host: the batch may have been corrupted on its way to the device"
    first = samples[0]
    who = "" if first["index"] is None else f"sample {first['index']} of {batch}: "
    where = f" ({first['source']})" if "source" in first else f" (id {first['id']})" if "id" in first else ""
    more = f", and {len(samples) - 1} more" if len(samples) > 1 else ""
    return f"{who}{first['what']}{where}{more}"


class Trials:
    """Runs a step with parts of its batch, within a budget of passes.

    Attributes:
        samples: number of samples of the step.
        passes: how often the model was run.
        most: the largest number of passes; about as many as a bisection needs for four culprits.
        forward_only: whether the loss alone fails, so that no backward pass is needed.
        filled: whether other samples replace those left out.
        cheap_seconds: seconds for which the search goes on, however many passes it takes.
    """

    cheap_seconds = 0.0

    def __init__(self, samples: int, deadline: float) -> None:
        self.samples, self.passes, self.deadline = samples, 0, deadline
        self.most, self.forward_only = 8 + 4 * math.ceil(math.log2(max(samples, 1))), False
        self.filled, self._cheap_until = False, time.monotonic() + self.cheap_seconds

    def can_go_on(self, passes: int) -> bool:
        """Returns whether the budget and the deadline allow that many more passes."""
        now = time.monotonic()
        return now < self.deadline and (self.passes + passes <= self.most or now < self._cheap_until)

    def whole_batch_fails(self) -> bool | None:
        """Returns whether the step is non-finite with its whole batch; None if it cannot be run."""
        numbers = self.numbers(self.whole()) if self.can_go_on(1) else None
        self.forward_only = numbers is not None and not math.isfinite(numbers[0])
        return None if numbers is None else not all(map(math.isfinite, numbers))

    def fails(self, batches: Sequence[Any]) -> bool | None:
        """Returns whether loss or gradient norm of these micro-batches is not finite; None if they cannot be run."""
        numbers = self.numbers(batches)
        return None if numbers is None else not all(map(math.isfinite, numbers))

    def numbers(self, batches: Sequence[Any]) -> Sequence[float] | None:
        """Returns the result of `run`; None if the model raises an error."""
        self.passes += 1
        try:
            return self.run(batches)
        except Exception:  # for example, BatchNorm rejects a single value
            return None

    def find_filler(self) -> bool:
        """Chooses samples that replace those left out; returns False if those are non-finite too."""
        other = self.other() if self.can_go_on(1) else None
        verdict = False if other is None else self.fails(other)
        self.filled = other is not None and verdict is False
        return not verdict

    def whole(self) -> Sequence[Any]:
        """Returns the micro-batches of the step."""
        raise NotImplementedError

    def other(self) -> Sequence[Any] | None:
        """Returns micro-batches of other samples, which can replace those of the step; None if there are none."""
        raise NotImplementedError

    def part(self, rows: Sequence[int]) -> Sequence[Any]:
        """Returns micro-batches with only these samples of the step.

        Those of `other` replace the rest if `filled`; otherwise the rest is left out.
        """
        raise NotImplementedError

    def run(self, batches: Sequence[Any]) -> Sequence[float]:
        """Runs the step on these micro-batches; returns the loss and, unless `forward_only`, the gradient norm."""
        raise NotImplementedError


def find_by_bisection(trials: Trials) -> Culprits:
    """Finds the samples that make a step non-finite, by bisection; forward only if the loss is non-finite.

    Samples of another batch replace those left out, which preserves shapes and dropout masks exactly, and BatchNorm's
    statistics approximately. Without another batch, the parts are smaller batches. For one culprit among n samples, the
    model runs at most 2 + 2 ceil(log2 n) times. The search stops after 8 + 4 ceil(log2 n) runs, or at the deadline.
    """
    all_samples = [*range(trials.samples)]
    if not all_samples or not trials.whole_batch_fails():
        return Culprits([], False, trials.passes)
    if not trials.find_filler():
        return Culprits(all_samples, False, trials.passes, others_too=True)
    waiting, alone, together = deque([all_samples]), [], []
    while waiting:
        rows = waiting.popleft()
        if len(rows) == 1:
            alone += rows
            continue
        halves = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        verdicts = [trials.fails(trials.part(half)) for half in halves] if trials.can_go_on(2) else [None]
        if None in verdicts or not any(verdicts):
            together += rows
        else:
            waiting.extend(half for half, bad in zip(halves, verdicts, strict=True) if bad)
    return Culprits(sorted(alone + together), not together, trials.passes)


class FixedDivisor(Objective):
    """An objective that always divides by the same number of targets.

    Args:
        objective: a plain one; the outputs go to it.
        n_valid: the number of targets, 0-d.
    """

    def __init__(self, objective: Objective, n_valid: Tensor) -> None:
        self._objective, self._n_valid = objective, n_valid

    def wrap(self, forward: Callable[..., Any], model: nn.Module, tools: StepTools) -> Callable[..., Any]:
        """Wraps `forward` as the plain objective does."""
        return self._objective.wrap(forward, model, tools)

    def classes(self, outputs: Any) -> int | None:
        """Returns the plain objective's number of classes."""
        return self._objective.classes(outputs)

    def __call__(self, outputs: Any, batch: Batch, n_valid: Tensor) -> LossTerms:
        """Same as the plain objective, but ignores `n_valid`."""
        return self._objective(outputs, batch, self._n_valid)


class Bisection(Trials):
    """Runs a step of the trainer with parts of its batch."""

    def __init__(self, repro: Repro) -> None:
        super().__init__(len(repro.batch), repro.deadline)
        self._repro, self._model, tools = repro, repro.copy_model(), repro.replay_tools()
        self._other: Batch | None = None
        # Divide by the number of targets in the whole batch. A few samples have few targets: divided by these alone,
        # their loss could overflow fp16 in the backward pass.
        n_valid = torch.tensor(max(repro.batch.count_targets(), 1), device=repro.device)
        self._tools = replace(tools, objective=FixedDivisor(tools.objective.plain, n_valid))

    def whole(self) -> list[Batch]:
        """Returns the micro-batches of the step."""
        return self._repro.to_micro_batches(self._repro.batch)

    def run(self, batches: Sequence[Batch]) -> Sequence[float]:
        """See `Trials`."""
        self._repro.reset_(self._model)
        if self.forward_only:
            return [forward_loss(self._model, batches, self._tools, self._repro.step)]
        return forward_backward(self._model, [*batches], self._tools, self._repro.step)[:2]

    def other(self) -> list[Batch] | None:
        """See `Trials`."""
        batch, self._other = self._repro.batch, None if self._repro.fresh is None else self._repro.fresh()
        if self._other is None or (self._other.inputs.shape, self._other.inputs.dtype) != (
            batch.inputs.shape,
            batch.inputs.dtype,
        ):
            return None
        return self._repro.to_micro_batches(self._other)

    def part(self, rows: Sequence[int]) -> list[Batch]:
        """See `Trials`."""
        batch = self._repro.batch
        if self._other is None or not self.filled:
            size = len(batch) // self._repro.micro_batches
            parts = [[*rows[start : start + size]] for start in range(0, len(rows), size)]
            return [Batch(batch.inputs[p], batch.targets[p]).to(self._repro.device) for p in parts]
        inputs, targets = self._other.inputs.clone(), self._other.targets.clone()
        inputs[rows], targets[rows] = batch.inputs[rows], batch.targets[rows]
        return self._repro.to_micro_batches(Batch(inputs, targets, sizes=batch.sizes))


def forward_loss(model: nn.Module, batches: Sequence[Batch], tools: Tools, step: int) -> float:
    """The loss alone, as `step.compute` computes it. The objective must ignore its `n_valid`."""
    ignored = torch.ones((), device=next(model.parameters()).device)
    total = 0.0
    with isolated(model), torch.no_grad():
        tools.determinism.seed_step(tools.seed, step)
        for batch in batches:
            with tools.precision.autocast():
                inputs = tools.sanitizer.inputs(batch.inputs)[0]
                outputs = model(inputs)
            targets = tools.sanitizer.targets(batch.targets, tools.objective.classes(outputs))[0]
            total += float(tools.objective(outputs, batch.having(inputs, targets), ignored).total)
    return total
