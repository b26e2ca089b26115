"""Finds bad samples of a batch: invalid values, and samples that make the step non-finite.

`bad_samples` checks the values of the batch on the host. `find_culprits` replays the step on parts of the batch, by
bisection.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from stabletrain.forensics.replay import perform
from stabletrain.forensics.repro import Repro
from stabletrain.monitors.forward import isolated
from stabletrain.protocols import Tools
from stabletrain.records import IGNORE_INDEX, Batch, LossTerms
from stabletrain.stability.objective import Objective

MOST = 8
"""Maximum number of samples to list."""


def bad_samples(batch: Batch, vocab_size: int | None, classes: int | None) -> list[dict[str, Any]]:
    """Returns the samples that `stability/sanitize.py` rejects, at most `MOST`, in batch order.

    Args:
        batch: on any device.
        vocab_size: upper bound of integer inputs; None if unknown.
        classes: upper bound of the targets; None if unknown.

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
                found.append({"index": index, **named(batch, index), "fault": fault, "what": what})
                break
    if not found and not batch.counted and not batch.count_targets():
        found = [
            {
                "index": None,
                **named(batch, 0),
                "fault": "ignored",
                "what": f"every target is {IGNORE_INDEX}, so all are ignored",
            }
        ]
    return found[:MOST]


def named(batch: Batch, index: int) -> dict[str, Any]:
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
            return f"input holds {int(bad.sum())} of {inputs.numel()} values that are NaN or Inf, the first{at(bad)}"
    elif vocab_size is not None:
        bad = (inputs < 0) | (inputs >= vocab_size)
        if bool(bad.any()):
            return f"token {int(inputs[bad][0])}{at(bad)} is outside [0, {vocab_size})"
    return ""


def bad_label(targets: Tensor, classes: int | None) -> str:
    """Describes what is wrong with a sample's targets; empty if nothing is."""
    if targets.is_floating_point():
        bad = ~torch.isfinite(targets)
        if bool(bad.any()):
            return f"target {float(targets[bad][0])}{at(bad)} is not a finite number"
        bad = (targets < 0) | (targets > (classes or 0) - 1) if classes is not None else torch.zeros_like(bad)
        return f"target {float(targets[bad][0]):.4g}{at(bad)} is outside [0, 1]" if bool(bad.any()) else ""
    if classes is None:
        return ""
    bad = ((targets < 0) | (targets >= classes)) & (targets != IGNORE_INDEX)
    return f"target {int(targets[bad][0])}{at(bad)} is outside [0, {classes})" if bool(bad.any()) else ""


def at(bad: Tensor) -> str:
    """Index of the first bad value in the sample, ` at [0, 3, 5]`; empty for a scalar."""
    place = bad.nonzero()[0].tolist()
    return f" at {place}" if place else ""


def describe(samples: Sequence[Mapping[str, Any]], batch: str = "the batch") -> str:
    """Describes the first bad sample in one line, and counts the others; `batch` says what their indices refer to."""
    if not samples:
        return "all samples are valid on the host: the batch may have been corrupted on its way to the device"
    first = samples[0]
    who = "" if first["index"] is None else f"sample {first['index']} of {batch}: "
    where = f" ({first['source']})" if "source" in first else f" (id {first['id']})" if "id" in first else ""
    more = f", and {len(samples) - 1} more" if len(samples) > 1 else ""
    return f"{who}{first['what']}{where}{more}"


@dataclass(frozen=True)
class Culprits:
    """The smallest part of a batch found to make its step non-finite.

    Attributes:
        samples: indices in the batch, in order; empty if the step is finite or could not be replayed.
        alone: whether each sample fails by itself. Otherwise they fail only together, or the search was cut off.
        passes: how often the model was run.
        others_too: whether another batch fails as well, so that no sample is to blame.
    """

    samples: list[int]
    alone: bool
    passes: int
    others_too: bool = False


def find_culprits(repro: Repro) -> Culprits:
    """Finds the samples that make the step non-finite, by bisection; forward only if the loss is non-finite.

    Samples of a fresh batch replace those left out, which preserves shapes and dropout masks exactly, and
    BatchNorm's statistics approximately. Without a fresh batch, the parts are smaller batches. For one culprit among n
    samples, the model runs at most 2 + 2 ceil(log2 n) times. The search stops
    after 8 + 4 ceil(log2 n) runs, or at the deadline.
    """
    return search(len(repro.batch), Bisection(repro))


@runtime_checkable
class Trials(Protocol):
    """Runs a step with parts of its batch, within a budget of passes.

    Attributes:
        passes: how often the model was run.
    """

    passes: int

    def can_go_on(self, passes: int) -> bool:
        """Returns whether the budget and the deadline allow that many more passes."""
        ...

    def whole(self) -> bool | None:
        """Returns whether the step is non-finite with its whole batch; None if it cannot be run."""
        ...

    def find_filler(self) -> bool:
        """Chooses samples that replace those left out; returns False if those are non-finite too."""
        ...

    def bad(self, rows: Sequence[int]) -> bool | None:
        """Returns whether the step is non-finite with these samples of the batch; None if it cannot be run."""
        ...


def search(samples: int, trials: Trials) -> Culprits:
    """Finds the samples that make a step non-finite, by bisection."""
    everyone = [*range(samples)]
    if not everyone or not trials.whole():
        return Culprits([], False, trials.passes)
    if not trials.find_filler():
        return Culprits(everyone, False, trials.passes, others_too=True)
    waiting, alone, together = deque([everyone]), [], []
    while waiting:
        rows = waiting.popleft()
        if len(rows) == 1:
            alone += rows
            continue
        halves = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        verdicts = [trials.bad(half) for half in halves] if trials.can_go_on(2) else [None]
        if None in verdicts or not any(verdicts):
            together += rows
        else:
            waiting.extend(half for half, bad in zip(halves, verdicts, strict=True) if bad)
    return Culprits(sorted(alone + together), not together, trials.passes)


@dataclass(frozen=True)
class Divided:
    """An objective that always divides by the same number of targets."""

    plain: Objective
    n_valid: Tensor

    def __getattr__(self, name: str) -> Any:
        """All else is the plain objective's."""
        return getattr(self.plain, name)

    def __call__(self, outputs: Any, batch: Batch, n_valid: Tensor) -> LossTerms:
        """Same as the plain objective, but ignores `n_valid`."""
        del n_valid
        return self.plain(outputs, batch, self.n_valid)


class Bisection:
    """Runs a step with parts of its batch, within a budget of passes.

    Attributes:
        passes: how often the model was run.
    """

    def __init__(self, repro: Repro) -> None:
        self.passes = 0
        self._repro, self._most = repro, 8 + 4 * math.ceil(math.log2(max(len(repro.batch), 1)))
        self._model, self._tools = repro.copy_model(), self._divided_as_then()
        self._forward_only = False
        self._filling: Batch | None = None

    def _divided_as_then(self) -> Tools:
        """The tools, with an objective that divides by the number of targets in the whole batch."""
        # A few samples have few targets. Divided by these alone, their loss could overflow fp16 in the backward pass.
        tools, count = self._repro.replay_tools(), self._repro.batch.count_targets()
        n_valid = torch.tensor(max(count, 1), device=self._repro.device)
        return replace(tools, objective=Divided(tools.objective.plain, n_valid))

    def can_go_on(self, passes: int) -> bool:
        """Whether the budget and the deadline allow that many more passes."""
        return self.passes + passes <= self._most and time.monotonic() < self._repro.deadline

    def whole(self) -> bool | None:
        """Whether the step is non-finite with its whole batch; decides whether backward is needed."""
        found = self._numbers(self._repro.to_micro_batches(self._repro.batch)) if self.can_go_on(1) else None
        self._forward_only = found is not None and not math.isfinite(found[0])
        return None if found is None else not all(map(math.isfinite, found))

    def find_filler(self) -> bool:
        """Chooses samples that replace those left out; returns False if those are non-finite too."""
        fresh, batch = self._repro.fresh, self._repro.batch
        if fresh is None or not self.can_go_on(1):
            return True
        other = fresh()
        if (other.inputs.shape, other.inputs.dtype) != (batch.inputs.shape, batch.inputs.dtype):
            return True
        verdict = self._non_finite(self._repro.to_micro_batches(other))
        self._filling = other if verdict is False else None
        return not verdict

    def bad(self, rows: Sequence[int]) -> bool | None:
        """Whether the step is non-finite with these samples of the batch; None if it cannot be run."""
        batch = self._repro.batch
        if self._filling is None:
            size = len(batch) // self._repro.micro_batches
            parts = [[*rows[start : start + size]] for start in range(0, len(rows), size)]
            return self._non_finite([Batch(batch.inputs[p], batch.targets[p]).to(self._repro.device) for p in parts])
        inputs, targets = self._filling.inputs.clone(), self._filling.targets.clone()
        inputs[rows], targets[rows] = batch.inputs[rows], batch.targets[rows]
        return self._non_finite(self._repro.to_micro_batches(Batch(inputs, targets)))

    def _non_finite(self, batches: list[Batch]) -> bool | None:
        found = self._numbers(batches)
        return None if found is None else not all(map(math.isfinite, found))

    def _numbers(self, batches: list[Batch]) -> tuple[float, ...] | None:
        """Loss and, if needed, gradient norm; None if the model raises."""
        self.passes += 1
        model, tools, step = self._model, self._tools, self._repro.step
        self._repro.reset_(model)
        try:
            if self._forward_only:
                return (forward(model, batches, tools, step),)
            return perform(model, batches, tools, step)[:2]
        except Exception:  # for example, BatchNorm rejects a single value
            return None


def forward(model: nn.Module, batches: list[Batch], tools: Tools, step: int) -> float:
    """The loss alone, as `step.compute` computes it. The objective must ignore its `n_valid`."""
    nobody_asks = torch.ones((), device=next(model.parameters()).device)
    total = 0.0
    with isolated(model), torch.no_grad():
        tools.determinism.seed_step(tools.seed, step)
        for batch in batches:
            with tools.precision.autocast():
                inputs = tools.sanitizer.inputs(batch.inputs)[0]
                outputs = model(inputs)
            targets = tools.sanitizer.targets(batch.targets, tools.objective.classes(outputs))[0]
            total += float(tools.objective(outputs, batch.having(inputs, targets), nobody_asks).total)
    return total
