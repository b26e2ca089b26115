"""The samples of a user's batch: which hold bad values, and which make the step fail.

A batch may be any nesting of tuples, lists and mappings with tensors. Tensors that have the batch's size as their first
dimension hold one sample in each row; others belong to the whole batch.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabletrain.forensics.diagnosis.evidence import LargestInput
from stabletrain.forensics.probes.samples import MAX_LISTED, first_place
from stabletrain.guarded.part import Part, map_tensors, named_tensors
from stabletrain.guarded.rerun import Pass, Rerun

CHEAP = 5.0
"""Seconds for which the search for samples goes on, however many passes it takes."""

LABELS = ("label", "labels", "target", "targets", "y")
"""Last parts of the names of tensors that hold labels."""


def size_of(batch: Any) -> int:
    """Returns the number of samples: the most common first dimension of the tensors; 0 if there is none."""
    sizes = [tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.ndim]
    return max(sizes, key=lambda size: (sizes.count(size), -sizes.index(size)), default=0)


def has_rows(tensor: Tensor, size: int) -> bool:
    """Returns whether a tensor holds one sample in each row."""
    return tensor.ndim > 0 and len(tensor) == size


class Row(NamedTuple):
    """A sample: the micro-batch it is in, and its row there."""

    part: int
    row: int


def rows_of(parts: Sequence[Part]) -> list[Row]:
    """Returns all samples of a step's micro-batches, in order."""
    return [Row(number, row) for number, part in enumerate(parts) for row in range(size_of(part.batch))]


def place(index: int, parts: Sequence[Part]) -> dict[str, int]:
    """Returns in which micro-batch and row a sample of the step is; empty if there is one micro-batch only."""
    if len(parts) < 2:
        return {}
    found = rows_of(parts)[index]
    return {"micro_batch": found.part, "row": found.row}


def bad_samples(parts: Sequence[Part], usual: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the samples that hold NaN or Inf, as `forensics/probes/samples.py` does.

    Args:
        usual: micro-batches of a step that was applied. What these hold NaN or Inf in is no fault: it means something.
    """
    allowed = {name for part in usual for name, tensor in named_tensors(part.batch) if not_finite(tensor).any()}
    found: dict[int, dict[str, Any]] = {}
    start = 0
    for part in parts:
        size = size_of(part.batch)
        tensors = named_tensors(part.batch)
        for name, tensor in tensors:
            bad = not_finite(tensor)
            if name in allowed or not has_rows(tensor, size) or not bad.any():
                continue
            label = name.rpartition(".")[2].lower() in LABELS or (len(tensors) > 1 and name == tensors[-1][0])
            for row in bad.reshape(size, -1).any(1).nonzero().flatten().tolist():
                mine = bad[row]
                what = f"{of_batch(name)} holds {int(mine.sum())} of {mine.numel()} values that are NaN or Inf"
                fault = {"fault": "label" if label else "input", "what": f"{what}, the first{first_place(mine)}"}
                found.setdefault(start + row, {"index": start + row, **place(start + row, parts), **fault})
        start += size
    return [found[index] for index in sorted(found)][:MAX_LISTED]


def without_bad_values(parts: Sequence[Part]) -> list[Part]:
    """Returns the same micro-batches with 0 in place of every NaN and Inf."""

    def cleaned(tensor: Tensor) -> Tensor:
        return tensor.nan_to_num(0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor

    return [Part(part.closure, map_tensors(cleaned, part.batch)) for part in parts]


def of_batch(name: str) -> str:
    """Names a tensor of a batch in words."""
    if not name:
        return "it"
    return f"element {name} of the batch" if name.isdigit() else f"'{name}' of the batch"


def not_finite(tensor: Tensor) -> Tensor:
    """Returns where a tensor is NaN or Inf, on the host."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=torch.bool)
    return (~torch.isfinite(tensor.detach())).cpu()


def largest_input(parts: Sequence[Part], usual: Sequence[Part]) -> LargestInput | None:
    """Returns the sample with the largest input, and the largest of another step; None for integers."""
    sizes = [sizes_of(part.batch) for part in parts]
    others = [sizes_of(part.batch) for part in usual]
    if not others or any(each is None for each in [*sizes, *others]):
        return None
    each, elsewhere = torch.cat([s for s in sizes if s is not None]), torch.cat([s for s in others if s is not None])
    index = int(each.argmax())
    return LargestInput({"index": index, **place(index, parts)}, float(each[index]), float(elsewhere.max()))


def sizes_of(batch: Any) -> Tensor | None:
    """Returns the largest magnitude of each sample in a batch's first tensor; None if this holds integers."""
    first = next((tensor for _, tensor in named_tensors(batch) if has_rows(tensor, size_of(batch))), None)
    if first is None or not first.is_floating_point() or not first.numel():
        return None
    return first.detach().abs().reshape(len(first), -1).amax(1).float().cpu()


def with_rows(batch: Any, rows: Sequence[int], filler: Any) -> Any:
    """Returns a batch with only these samples: the others are replaced by those of `filler`, or left out if None."""
    size = size_of(batch)
    kept = torch.zeros(size, dtype=torch.bool)
    kept[list(rows)] = True
    others = iter([tensor for _, tensor in named_tensors(filler)])

    def chosen(tensor: Tensor) -> Tensor:
        other = next(others, None)
        if not has_rows(tensor, size):
            return tensor
        if other is None:
            return tensor[kept.to(tensor.device)]
        mask = kept.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1))
        return torch.where(mask, tensor, other.to(tensor.device))

    return map_tensors(chosen, batch)


def alike(batch: Any, other: Any) -> bool:
    """Returns whether two batches hold tensors of the same names, shapes and dtypes, in different memory."""

    def form(value: Any) -> list[Any]:
        return [(name, tensor.shape, tensor.dtype) for name, tensor in named_tensors(value)]

    def memory(value: Any) -> list[int]:
        return [tensor.data_ptr() for _, tensor in named_tensors(value)]

    return form(batch) == form(other) and memory(batch) != memory(other)


class BatchTrials:
    """Runs a step of a user's loop with some of its samples; see `Trials`.

    Attributes:
        passes: how often the closures were run.
    """

    def __init__(self, rerun: Rerun, usual: Sequence[Part], deadline: float) -> None:
        self.passes = 0
        self._rerun, self._deadline = rerun, deadline
        self._parts, self._rows = rerun.begun.parts, rows_of(rerun.begun.parts)
        # Passes of a small model are cheap. A large one gets as many as `find_culprits` allows.
        self._most, self._cheap_until = 8 + 4 * math.ceil(math.log2(max(len(self._rows), 1))), time.monotonic() + CHEAP
        fits = len(usual) == len(self._parts)
        fits = fits and all(alike(mine.batch, other.batch) for mine, other in zip(self._parts, usual, strict=True))
        self._fillers = [part.batch for part in usual] if fits else [None] * len(self._parts)
        self._forward_only = False

    def can_go_on(self, passes: int) -> bool:
        """See `Trials`."""
        now = time.monotonic()
        return now < self._deadline and (self.passes + passes <= self._most or now < self._cheap_until)

    @property
    def samples(self) -> int:
        """Number of samples of the step."""
        return len(self._rows)

    def whole_batch_fails(self) -> bool | None:
        """See `Trials`; decides whether a backward pass is needed."""
        found = self._run(self._parts) if self.can_go_on(1) else None
        self._forward_only = found is not None and not math.isfinite(found.loss)
        return self._fails(found)

    def find_filler(self) -> bool:
        """See `Trials`."""
        if any(filler is None for filler in self._fillers) or not self.can_go_on(1):
            return True
        filled = [Part(part.closure, other) for part, other in zip(self._parts, self._fillers, strict=True)]
        verdict = self._fails(self._run(filled))
        if verdict is None:
            self._fillers = [None] * len(self._parts)
        return not verdict

    def fails_with(self, rows: Sequence[int]) -> bool | None:
        """See `Trials`. Without a filler, micro-batches that hold none of these samples are left out."""
        mine: dict[int, list[int]] = {}
        for index in rows:
            mine.setdefault(self._rows[index].part, []).append(self._rows[index].row)
        parts = [
            Part(part.closure, with_rows(part.batch, mine.get(number, []), filler))
            for number, (part, filler) in enumerate(zip(self._parts, self._fillers, strict=True))
            if filler is not None or number in mine  # a filled micro-batch draws the same random numbers
        ]
        return self._fails(self._run(parts))

    def _run(self, parts: Sequence[Part]) -> Pass | None:
        """Runs the closures; None if one raises, as BatchNorm does for a single sample."""
        self.passes += 1
        try:
            return self._rerun.run(parts, backward=not self._forward_only)
        except Exception:
            return None

    def _fails(self, found: Pass | None) -> bool | None:
        if found is None:
            return None
        return not (math.isfinite(found.loss) and (self._forward_only or math.isfinite(found.grad_norm)))
