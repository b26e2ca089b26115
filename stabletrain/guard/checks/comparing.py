"""Compares two results of one computation, bit for bit or by how far they differ, without waiting for the device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stabletrain.guard.checks.written import extremes, own

TINY = 1e-30
"""Smallest difference reported between values whose bits differ, such as 0 and -0."""

INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each element size in bytes."""


@dataclass(frozen=True)
class Compared:
    """Two results of the same computation, on the device.

    Attributes:
        names: the tensors' names.
        ratios: fp32 `[tensors]`, max|a - b| / max(|a|, |b|); 0 if all bits are equal.
        first, second: int64 `[tensors]`, sums of the bits.
        again: computes a third result, and returns its sums; None if the trainer does so.
        generators: states of the random generators before the computation.
        limits: fp32 `[tensors]`, the largest ratio of each tensor that is no fault; None if bits must be equal.
        everywhere: fp32, the largest ratios of all ranks, from which limits are learnt; None if `ratios` are these.
    """

    names: Sequence[str]
    ratios: Tensor
    first: Tensor
    second: Tensor
    again: Callable[[], Tensor] | None = None
    generators: Any = None
    limits: Tensor | None = None
    everywhere: Tensor | None = None


@torch.no_grad()
def compare(
    pairs: Sequence[tuple[str, Tensor | None, Tensor | None]],
    device: torch.device,
    *,
    again: Callable[[], Tensor] | None = None,
    generators: Any = None,
) -> Compared:
    """Compares tensors by name. Overwrites the second tensor of each pair, so that no memory of its size is needed.

    Args:
        device: where the results are.
    """
    names, firsts, seconds = [name for name, _, _ in pairs], [a for _, a, _ in pairs], [b for _, _, b in pairs]
    first, second = sums(firsts, device), sums(seconds, device)
    found = ratios(firsts, seconds, device)
    # Neither an underflow nor the sign of a zero may hide a difference.
    found = torch.where(first != second, found.clamp(min=TINY), found)
    return Compared(names, found, first, second, again, generators)


def ratios(firsts: Sequence[Tensor | None], seconds: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns max|a - b| / max(|a|, |b|) of each pair as fp32 `[pairs]`; overwrites the second tensors.

    It is inf if only one tensor of a pair is finite, or exists. It is 0 if neither is finite: the step is skipped.
    """
    found = [torch.zeros((), device=device)] * len(firsts)
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor, Tensor]]] = {}
    for number, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
            if first is not second:
                found[number] = torch.full((), math.inf, device=device)
            continue
        a, b = real(first), real(second)
        if a.numel():
            alike.setdefault((a.device, a.dtype), []).append((number, a, b))
    for pairs in alike.values():
        numbers, a, b = zip(*pairs, strict=True)
        a, b = floats(a), floats(b)
        mine, others = largest(a), largest(b)
        torch._foreach_sub_(b, a)
        size = torch.maximum(mine, others)
        ratio = largest(b) / torch.where(size > 0, size, 1.0)
        ratio = torch.where(size.isfinite(), ratio, math.inf)
        ratio = torch.where(mine.isfinite() | others.isfinite(), ratio, 0.0).float().to(device)
        for number, each in zip(numbers, ratio.unbind(), strict=True):
            found[number] = each
    return torch.stack(found)


def largest(tensors: list[Tensor]) -> Tensor:
    """Returns the largest magnitude in each tensor, in fp32 or wider: NaN if a value is NaN, Inf if one is."""
    found = extremes(tensors).view(len(tensors), -1).amax(dim=1)
    return found.to(torch.promote_types(found.dtype, torch.float32))


def floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors of one dtype as they are, or as float64 if they hold integers."""
    return [*tensors] if tensors[0].is_floating_point() else [tensor.double() for tensor in tensors]


def sums(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the sum of the bits of each tensor, modulo 2^64; int64 `[tensors]`."""
    found = [None if tensor is None else bits(real(tensor)).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(
        [torch.zeros((), dtype=torch.int64, device=device) if s is None else s.to(device) for s in found]
    )


def bits(tensor: Tensor) -> Tensor:
    """Returns the tensor's bits as integers of the same size."""
    return tensor.view(INTEGER_OF_SIZE[tensor.element_size()])


def real(tensor: Tensor) -> Tensor:
    """Returns a dense tensor without its graph, complex values as pairs; of a sharded one, this rank's shard."""
    tensor = own(tensor)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
