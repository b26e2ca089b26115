"""Host memory for copies of a state: few flat blocks instead of one allocation for each tensor.

For copies from CUDA the blocks are page-locked, so that a copy runs beside the training. PyTorch rounds page-locked
memory up to a power of two bytes, so a block for each tensor would take 1.76 times the bytes of GPT-2's state. Each
block is therefore a power of two. Pageable memory is one block that holds exactly the tensors.

Page-locked memory cannot be swapped, and PyTorch never returns it to the system. `page_lock(False)` makes all copies of
this process pageable; the host then waits for each copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 256
"""Every tensor begins at a multiple of so many bytes of its block."""

SLACK = 16
"""No more than one in so many bytes of page-locked blocks is unused, if the tensors can be placed so well."""


def room(tensor: Tensor) -> int:
    """Returns the bytes that a tensor takes in a block."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def places(sizes: Sequence[int], rounded: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Places tensors in blocks.

    Args:
        sizes: bytes of each tensor, multiples of `ALIGNED`.
        rounded: whether a block takes a power of two bytes whatever its size; else one block holds everything.

    Returns:
        the bytes of each block, and the block and first byte of each tensor.
    """
    blocks: list[int] = []
    found: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    left = sorted(range(len(sizes)), key=lambda i: -sizes[i])  # large tensors first, the small ones fill the gaps
    whole = sum(sizes)
    while left:
        missing = sum(sizes[i] for i in left)
        size = missing
        if rounded:
            size = 1 << (missing - 1).bit_length() if missing else 0
            if size - missing > whole // SLACK:  # rounded down instead, if the largest tensor fits; the rest follows
                size = max(size // 2, 1 << (sizes[left[0]] - 1).bit_length())
        end, rest = 0, []
        for i in left:
            if end + sizes[i] <= size:
                found[i], end = (len(blocks), end), end + sizes[i]
            else:
                rest.append(i)
        blocks.append(size)
        left = rest
    return blocks, found


_PAGE_LOCKED = [True]


def page_lock(allowed: bool) -> None:
    """Sets whether this process may copy states from CUDA to page-locked memory."""
    _PAGE_LOCKED[0] = allowed


def block(size: int, pinned: bool) -> Tensor:
    """Returns `size` uninitialised bytes of host memory, `[size]` uint8."""
    # Deterministic algorithms make `torch.empty` fill what it returns: gigabytes here, which copies overwrite anyway.
    storage = torch.empty(0, dtype=torch.uint8, device="cpu", pin_memory=pinned).untyped_storage()
    storage.resize_(size)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous, uninitialised host tensors of the same shapes and dtypes, in few blocks.

    Those for CUDA tensors are page-locked, unless `page_lock` forbids it.
    """
    copies: dict[int, Tensor] = {}
    for on_card in (True, False):
        group = [i for i, tensor in enumerate(tensors) if (tensor.device.type == "cuda") is on_card]
        copies |= zip(group, in_blocks([tensors[i] for i in group], on_card and _PAGE_LOCKED[0]), strict=True)
    return [copies[i] for i in range(len(tensors))]


def in_blocks(tensors: Sequence[Tensor], pinned: bool) -> list[Tensor]:
    """Returns uninitialised host tensors of the same shapes and dtypes, as views of new blocks."""
    sizes, where = places([room(tensor) for tensor in tensors], pinned)
    blocks = [block(size, pinned) for size in sizes]

    def view(tensor: Tensor, number: int, start: int) -> Tensor:
        taken = blocks[number][start : start + tensor.numel() * tensor.element_size()]
        return taken.view(tensor.dtype).view(tensor.shape)

    return [view(tensor, *place) for tensor, place in zip(tensors, where, strict=True)]
