"""The samples of a user's batch: which hold bad values, and which make the step fail.

A batch may be any nesting of tuples, lists and mappings with tensors. Tensors that have the batch's size as their first
dimension hold one sample in each row; others belong to the whole batch.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabletrain.forensics.facts import LargestInput, largest_value, most_unusual
from stabletrain.forensics.probes.samples import MAX_LISTED, Trials, first_place, sample_sizes
from stabletrain.forensics.rerun import NotPossible
from stabletrain.guard.guilty import Counts, Sample
from stabletrain.guard.micro_batch import MicroBatch, map_tensors, named_tensors
from stabletrain.guard.rerun import Rerun

NO_BATCH = "the closure takes no batch: let it take one, and pass it as guard.step(closure, batch=...)"

LABEL_NAMES = ("label", "labels", "target", "targets", "y")
"""Last parts of the names of tensors that hold labels."""


def sample_count(batch: Any) -> int:
    """Returns the number of samples: the most common first dimension of the tensors; 0 if there is none."""
    sizes = [tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.ndim]
    return max(sizes, key=lambda size: (sizes.count(size), -sizes.index(size)), default=0)


def has_rows(tensor: Tensor, size: int) -> bool:
    """Returns whether a tensor holds one sample in each row."""
    return tensor.ndim > 0 and len(tensor) == size


class Row(NamedTuple):
    """A sample: the micro-batch it is in, and its row there."""

    micro_batch: int
    row: int


def rows_of(micro_batches: Sequence[MicroBatch]) -> list[Row]:
    """Returns all samples of a step's micro-batches, in order."""
    return [Row(number, row) for number, each in enumerate(micro_batches) for row in range(sample_count(each.batch))]


def place_of(index: int, micro_batches: Sequence[MicroBatch]) -> dict[str, int]:
    """Returns in which micro-batch and row a sample of the step is; empty if there is one micro-batch only."""
    if len(micro_batches) < 2:
        return {}
    return rows_of(micro_batches)[index]._asdict()


def empty_batches(micro_batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
    """Returns the micro-batches that have tensors, but no values, as `forensics/probes/samples.py` does."""
    found = []
    for number, each in enumerate(micro_batches):
        sizes = [tensor.numel() for _, tensor in named_tensors(each.batch)]
        if sizes and not any(sizes):
            name = "the batch" if len(micro_batches) == 1 else f"micro-batch {number}"
            found.append({"index": None, "fault": "empty", "what": f"{name} is empty"})
    return found[:MAX_LISTED]


def bad_samples(micro_batches: Sequence[MicroBatch], usual: Sequence[MicroBatch]) -> list[dict[str, Any]]:
    """Returns the samples that hold NaN or Inf, as `forensics/probes/samples.py` does.

    Args:
        usual: micro-batches of a step that was applied. A tensor that holds NaN or Inf here uses them as marks, for
            example of missing values, and is not reported.
    """
    tensors_of_usual = [pair for each in usual for pair in named_tensors(each.batch)]
    allowed = {name for name, tensor in tensors_of_usual if not_finite(tensor).any()}
    found: dict[int, dict[str, Any]] = {}
    start = 0
    for micro_batch in micro_batches:
        size, tensors = sample_count(micro_batch.batch), named_tensors(micro_batch.batch)
        for name, tensor in tensors:
            bad = not_finite(tensor)
            if name in allowed or not has_rows(tensor, size) or not bad.any():
                continue
            label = name.rpartition(".")[2].lower() in LABEL_NAMES or (len(tensors) > 1 and name == tensors[-1][0])
            for row in bad.reshape(size, -1).any(1).nonzero().flatten().tolist():
                mine = bad[row]
                what = f"{tensor_name(name)} holds {int(mine.sum())} of {mine.numel()} values that are NaN or Inf"
                fault = {"fault": "label" if label else "input", "what": f"{what}, the first{first_place(mine)}"}
                found.setdefault(start + row, {"index": start + row, **place_of(start + row, micro_batches), **fault})
        start += size
    return [found[index] for index in sorted(found)][:MAX_LISTED]


def without_bad_values(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Returns the same micro-batches with 0 in place of every NaN and Inf."""

    def cleaned(tensor: Tensor) -> Tensor:
        return tensor.nan_to_num(0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor

    return [MicroBatch(each.closure, map_tensors(cleaned, each.batch)) for each in micro_batches]


def tensor_name(name: str) -> str:
    """Names a tensor of a batch in words."""
    if not name:
        return "it"
    return f"element {name} of the batch" if name.isdigit() else f"'{name}' of the batch"


def not_finite(tensor: Tensor) -> Tensor:
    """Returns where a tensor is NaN or Inf, on the host."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=torch.bool)
    return (~torch.isfinite(tensor.detach())).cpu()


def largest_input(micro_batches: Sequence[MicroBatch], usual: Sequence[MicroBatch]) -> LargestInput | None:
    """Returns the sample with the largest value, compared with the same tensor of another step.

    Of several tensors, the one that exceeds the other step by the largest factor; None without tensors to compare.
    """
    mine, others = sizes_by_name(micro_batches), sizes_by_name(usual)
    places = {name: f" in {tensor_name(name)}" if number else "" for number, name in enumerate(mine)}
    common = [name for name in mine if name in others]
    found = most_unusual([largest_value(mine[name], max(others[name]), places[name]) for name in common])
    return found and replace(found, sample={**found.sample, **place_of(found.sample["index"], micro_batches)})


def sizes_by_name(micro_batches: Sequence[MicroBatch]) -> dict[str, list[float]]:
    """Returns the largest magnitude of each sample, for the floating-point tensors that every micro-batch has."""
    found: dict[str, list[float]] = {}
    for number, each in enumerate(micro_batches):
        size = sample_count(each.batch)
        rows = {name: sample_sizes(tensor) for name, tensor in named_tensors(each.batch) if has_rows(tensor, size)}
        found = {name: found.get(name, []) + row for name, row in rows.items() if row and (name in found or not number)}
    return found


def with_samples(batch: Any, rows: Sequence[int], filler: Any) -> Any:
    """Returns a batch with only these samples: the others are replaced by those of `filler`, or left out if None."""
    size = sample_count(batch)
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


def without_samples(
    micro_batches: Sequence[MicroBatch], counts: Counts, rank: int, left_out: Collection[Sample]
) -> list[MicroBatch]:
    """Returns this rank's micro-batches without some samples of the step; one that loses all its samples is dropped.

    A closure returns the mean over its samples, divided by the number of micro-batches. Its loss is multiplied so that
    every sample that is left, on any rank, has the weight relative to the others that it had in the whole step. With
    one micro-batch in one process this factor is 1.

    Args:
        counts: number of samples of each micro-batch, on each rank.
    """
    left = [[Fraction(size) for size in sizes] for sizes in counts]
    for sample in left_out:
        left[sample.rank][sample.micro_batch] -= 1
    shares = [[rows / size for rows, size in zip(*pair, strict=True)] for pair in zip(left, counts, strict=True)]
    whole = Fraction(sum(map(len, shares))) / sum(map(sum, shares))
    found = []
    for number, (each, size) in enumerate(zip(micro_batches, counts[rank], strict=True)):
        rows = [row for row in range(size) if Sample(rank, number, row) not in left_out]
        if rows:
            batch = each.batch if len(rows) == size else with_samples(each.batch, rows, None)
            found.append(MicroBatch(weighted(each.closure, float(shares[rank][number] * whole)), batch))
    return found


def weighted(closure: Callable[..., Any], weight: float) -> Callable[..., Any]:
    """Returns a closure whose loss is multiplied by `weight`."""
    if weight == 1.0:
        return closure

    @functools.wraps(closure)
    def run(*arguments: Any) -> Any:
        value = closure(*arguments)
        return (value[0] * weight, *value[1:]) if isinstance(value, tuple) and len(value) > 1 else value * weight

    setattr(run, "not_replayable", "its loss was weighted, because samples were left out of the step")  # noqa: B010
    return run


def with_other_batches(micro_batches: Sequence[MicroBatch], usual: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Returns this step's closures with the batches of the last step that was applied, `usual`.

    Raises:
        NotPossible: there is no other batch.
    """
    if not all(each.takes_batch for each in micro_batches):
        raise NotPossible(NO_BATCH)
    if not usual:
        raise NotPossible("no step was applied before, so there is no other batch")
    if not memory_of_samples(micro_batches).isdisjoint(memory_of_samples(usual)):
        raise NotPossible("the loop reuses the memory of a batch, so there is no other batch")
    return [MicroBatch(each.closure, usual[i % len(usual)].batch) for i, each in enumerate(micro_batches)]


def memory_of_samples(micro_batches: Sequence[MicroBatch]) -> set[int]:
    """Returns the addresses of the tensors that hold a sample in each row."""
    tensors = [(t, sample_count(each.batch)) for each in micro_batches for _, t in named_tensors(each.batch)]
    return {t.data_ptr() for t, size in tensors if t.numel() and t.layout == torch.strided and has_rows(t, size)}


def forms(micro_batches: Sequence[MicroBatch]) -> list[Any]:
    """Returns names, shapes and dtypes of the tensors of each micro-batch."""
    return [[(name, t.shape, t.dtype) for name, t in named_tensors(each.batch)] for each in micro_batches]


class BatchTrials(Trials):
    """Runs a step of a user's loop with some of its samples. Passes of a small model are cheap."""

    cheap_seconds = 5.0

    def __init__(self, rerun: Rerun, usual: Sequence[MicroBatch], deadline: float) -> None:
        self._rerun, self._micro_batches, self._usual = rerun, rerun.begun.micro_batches, usual
        self._rows = rows_of(self._micro_batches)
        super().__init__(len(self._rows), deadline)

    def whole(self) -> Sequence[MicroBatch]:
        """Returns the micro-batches of the step."""
        return self._micro_batches

    def other(self) -> Sequence[MicroBatch] | None:
        """Returns the step's closures with the batches of the last step that was applied."""
        if forms(self._micro_batches) != forms(self._usual):
            return None
        with contextlib.suppress(NotPossible):
            return with_other_batches(self._micro_batches, self._usual)

    def part(self, rows: Sequence[int]) -> list[MicroBatch]:
        """See `Trials`. Unless `filled`, micro-batches that hold none of these samples are left out."""
        mine: dict[int, list[int]] = {}
        for index in rows:
            mine.setdefault(self._rows[index].micro_batch, []).append(self._rows[index].row)
        fillers = [each.batch for each in self._usual] if self.filled else [None] * len(self._micro_batches)
        return [
            MicroBatch(each.closure, with_samples(each.batch, mine.get(number, []), filler))
            for number, (each, filler) in enumerate(zip(self._micro_batches, fillers, strict=True))
            if self.filled or number in mine  # a filled micro-batch draws the same random numbers
        ]

    def run(self, batches: Sequence[MicroBatch]) -> Sequence[float]:
        """See `Trials`."""
        found = self._rerun.run(batches, backward=not self.forward_only)
        return [found.loss] if self.forward_only else [found.loss, found.grad_norm]
