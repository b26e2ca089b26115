"""Exact checksums of tensors: sums of their bits as 64-bit integers, which do not depend on the order of addition.

The bytes of the tensors are laid out as grids of `WIDTH` integers per row, and each row and each column is
summed modulo 2**64. A change inside one row changes a column's sum, and a change inside one column changes a row's, so
no such change is missed. Any other change is missed only if all its differences cancel in every row and every column.

Large tensors are summed where they lie. Small ones are first copied into one vector, so that a model with hundreds of
them costs few kernels. Nothing here waits for the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

WIDTH = 512
"""Integers in a row of a grid: 4 KiB."""

ROW_BYTES = 8 * WIDTH
"""Bytes in a row."""

LARGE_BYTES = {"cpu": 2**16, "cuda": 2**20}
"""A tensor of at least so many bytes is summed where it lies. On a CPU a call costs little, and a copy is slow."""


class Span(NamedTuple):
    """Bytes of one tensor that lie in one grid.

    Attributes:
        name: of the tensor.
        first: first byte of the grid that holds them.
        start, stop: which of the tensor's bytes they are.
    """

    name: str
    first: int
    start: int
    stop: int


class Checksums:
    """The checksums of some tensors on one device.

    Args:
        tensors: by name, all on one device. Their memory is looked up now: make a new object if one was replaced.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = [*tensors.values()]
        self._large: list[Int64[Tensor, "rows width"]] = []
        self._small: list[Tensor] = []
        self._spans: list[list[Span]] = []  # of each large grid; the last list is that of the small tensors
        small: list[Span] = []
        end = 0
        for name, tensor in tensors.items():
            data = memory(tensor)
            cut = 0
            large = LARGE_BYTES.get(tensor.device.type, LARGE_BYTES["cuda"])
            if data is not None and len(data) >= large and data.storage_offset() % 8 == 0:
                cut = len(data) // ROW_BYTES * ROW_BYTES
                self._large.append(data[:cut].view(torch.int64).view(-1, WIDTH))
                self._spans.append([Span(name, 0, 0, cut)])
            size = tensor.numel() * tensor.element_size()
            if size > cut:
                self._small.append(tensor if data is None else data[cut:])
                small.append(Span(name, end, cut, size))
                end += size - cut
        self._spans.append(small)
        self._rows = [*(len(grid) for grid in self._large), -(-end // ROW_BYTES)]
        self._padding = torch.zeros(-end % ROW_BYTES, dtype=torch.uint8, device=self._tensors[0].device)

    def are_of(self, tensors: Mapping[str, Tensor]) -> bool:
        """Returns whether these are the same tensor objects."""
        return len(tensors) == len(self._tensors) and all(map(lambda a, b: a is b, tensors.values(), self._tensors))

    @torch.no_grad()
    def sums(self) -> Int64[Tensor, " sums"]:
        """Returns the sums of each grid: those of its rows, then those of its columns."""
        found = torch.empty(sum(self._rows) + WIDTH * len(self._rows), dtype=torch.int64, device=self._padding.device)
        grids = [*self._large, self._gathered()]
        parts = iter(found.split([size for rows in self._rows for size in (rows, WIDTH)]))
        for grid in grids:
            torch.sum(grid, 1, out=next(parts))
            torch.sum(grid, 0, out=next(parts))
        return found

    def _gathered(self) -> Int64[Tensor, "rows width"]:
        """Copies the small tensors into one grid."""
        views = (each if each.dtype == torch.uint8 and each.ndim == 1 else flat(each) for each in self._small)
        return torch.cat([*views, self._padding]).view(torch.int64).view(-1, WIDTH)

    def changed(self, before: Sequence[int], after: Sequence[int]) -> list[tuple[str, int, int]]:
        """Returns which tensors differ between two results of `sums`, on the host.

        A single change lies where the row that differs crosses the column that differs. Of several changes, only the
        rows and columns are known in which they all lie, so that a small tensor's neighbours may be named with it.

        Returns:
            for each tensor its name, and the first and last byte (exclusive) of it that may differ.
        """
        found: list[tuple[str, int, int]] = []
        start = 0
        for rows, spans in zip(self._rows, self._spans, strict=True):
            stop = start + rows
            in_rows = [row for row in range(rows) if before[start + row] != after[start + row]]
            columns = [column for column in range(WIDTH) if before[stop + column] != after[stop + column]]
            start = stop + WIDTH
            if not in_rows and not columns:
                continue
            bounds = (8 * columns[0], 8 * columns[-1] + 8) if columns else (0, ROW_BYTES)
            found += merged(each for row in in_rows or range(rows) for each in overlapping(spans, row, *bounds))
        return found


def overlapping(spans: Sequence[Span], row: int, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """Yields the bytes of each tensor that lie between two bytes of a row of their grid."""
    for span in spans:
        first = max(row * ROW_BYTES + start, span.first)
        last = min(row * ROW_BYTES + stop, span.first + span.stop - span.start)
        if first < last:
            yield span.name, span.start + first - span.first, span.start + last - span.first


def merged(parts: Iterator[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Returns one range for each tensor, from its first byte to its last."""
    found: dict[str, tuple[int, int]] = {}
    for name, start, stop in parts:
        known = found.get(name, (start, stop))
        found[name] = min(known[0], start), max(known[1], stop)
    return [(name, start, stop) for name, (start, stop) in found.items()]


def memory(tensor: Tensor) -> UInt8[Tensor, " bytes"] | None:
    """Returns a view of a tensor's bytes in the order of memory; None if they have gaps."""
    if tensor.is_contiguous():
        return flat(tensor)
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != size:
            return None
        size *= length
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def flat(tensor: Tensor) -> UInt8[Tensor, " bytes"]:
    """Returns the bytes of a tensor in order; a copy of them if its memory has gaps."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
