"""Compares two results of one computation, bit for bit or by how far they differ, without waiting for the device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TINY = 1e-30
"""Lower bound of a difference between values whose bits differ, such as 0 and -0."""

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each element size in bytes."""


@dataclass(frozen=True)
class Compared:
    """Two results of the same computation, on the device.

    Attributes:
        names: of the tensors.
        ratios: fp32 `[tensors]`, max|a - b| / max|a|; 0 if all bits are equal.
        first, second: int64 `[tensors]`, sums of the bits.
        again: computes it a third time, and returns its sums; None if the trainer does so.
        generators: states of the random generators before it.
    """

    names: Sequence[str]
    ratios: Tensor
    first: Tensor
    second: Tensor
    again: Callable[[], Tensor] | None = None
    generators: Any = None


@torch.no_grad()
def compare(
    pairs: Sequence[tuple[str, Tensor | None, Tensor | None]],
    *,
    again: Callable[[], Tensor] | None = None,
    generators: Any = None,
) -> Compared:
    """Compares tensors by name; at least one of each pair is not None."""
    device = next(tensor.device for _, a, b in pairs for tensor in (a, b) if tensor is not None)
    names, firsts, seconds = [name for name, _, _ in pairs], [a for _, a, _ in pairs], [b for _, _, b in pairs]
    ratios = torch.stack([ratio(a, b).to(device) for _, a, b in pairs])
    return Compared(names, ratios, sums(firsts, device), sums(seconds, device), again, generators)


def ratio(a: Tensor | None, b: Tensor | None) -> Tensor:
    """Returns max|a - b| / max|a| as fp32, 0-d: 0 if all bits are equal, inf if one is NaN, or missing."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        one = a if a is not None else b
        assert one is not None
        return torch.full((), math.inf, device=one.device)
    a, b = own(a), own(b)
    if not a.numel():
        return torch.zeros((), device=a.device)
    equal = bits(a) == bits(b)  # NaN equals itself here, and 0 is not -0
    a, b = (each if each.dtype == torch.float64 else each.float() for each in (a, b))
    gap = torch.where(equal, 0.0, (a - b).abs().clamp(min=TINY)).amax()
    size = a.abs().amax()
    size = torch.where(torch.isfinite(size) & (size > 0), size, 1.0)
    # Neither an underflow nor NaN may hide a difference.
    found = torch.where(gap > 0, (gap / size).clamp(min=TINY), gap)
    return torch.nan_to_num(found, nan=math.inf, posinf=math.inf).float()


def sums(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the sum of the bits of each tensor, modulo 2^64; int64 `[tensors]`."""
    found = [None if tensor is None else bits(own(tensor)).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(
        [torch.zeros((), dtype=torch.int64, device=device) if s is None else s.to(device) for s in found]
    )


def bits(tensor: Tensor) -> Tensor:
    """Returns the tensor's bits as integers of the same size."""
    return tensor.view(WHOLE[tensor.element_size()])


def own(tensor: Tensor) -> Tensor:
    """Returns a tensor without its graph, complex values as pairs; of a sharded one, this rank's shard."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # ty: ignore[not-callable]
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
