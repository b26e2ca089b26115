"""Host memory for copies of a state: few blocks, nothing wasted, nothing filled."""

from itertools import pairwise

import pytest
import torch

from stabletrain.checkpoint import host_copies as module
from stabletrain.checkpoint.host_copies import ALIGNED, block, host_copies, page_lock, places, room
from stabletrain.checkpoint.tree import to_host
from tests.tools.fake_card import as_if_on_a_card

GPT2 = [4 * n for n in [50257 * 768, 1024 * 768, *([768] * 4 + [768 * 768] * 4 + [4 * 768 * 768] * 2) * 12, 768]]
"""Bytes of the weights of GPT-2."""


@pytest.mark.parametrize(
    "sizes", [GPT2 * 3 + [4] * len(GPT2), [7], [20000, 7, 7], [1000, 300, 300, 300], [0, 0], []], ids=len
)
@pytest.mark.parametrize("rounded", [True, False])
def test_tensors_lie_apart_in_blocks_without_waste(sizes, rounded):
    sizes = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    blocks, where = places(sizes, rounded)
    taken = {}
    for size, (number, start) in zip(sizes, where, strict=True):
        assert start % ALIGNED == 0
        assert start + size <= blocks[number]
        taken.setdefault(number, []).append((start, start + size))
    for spans in taken.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    if not rounded:
        assert len(blocks) <= 1
        assert sum(blocks) == sum(sizes)
    else:
        assert all(size & (size - 1) == 0 for size in blocks), "powers of two: the allocator rounds nothing up"
    if sizes[:3] == GPT2[:3]:
        one_each = sum(1 << (size - 1).bit_length() for size in sizes)
        assert one_each > 1.7 * sum(sizes), "a block for each tensor"
        assert sum(blocks) < 1.02 * sum(sizes)
        assert len(blocks) < 6


def test_one_block_is_taken_if_its_waste_is_small_and_two_if_not():
    assert places([64 * 1024] * 63 + [60 * 1024], rounded=True)[0] == [4096 * 1024]
    assert places([64 * 1024] * 40, rounded=True)[0] == [2048 * 1024, 512 * 1024]


def test_room_is_enough_for_every_dtype_and_shape():
    tensors = [torch.zeros(3, dtype=torch.bool), torch.zeros((), dtype=torch.int64), torch.zeros(2, 0), torch.zeros(65)]
    copies = host_copies(tensors)
    assert [(copy.shape, copy.dtype) for copy in copies] == [(tensor.shape, tensor.dtype) for tensor in tensors]
    assert [room(tensor) for tensor in tensors] == [ALIGNED, ALIGNED, 0, 2 * ALIGNED]


def test_deterministic_algorithms_do_not_fill_the_memory_first():
    torch.use_deterministic_algorithms(True)
    try:
        assert (torch.empty(2**26, dtype=torch.uint8) == 255).all(), "what PyTorch does"
        assert not (block(2**26, pinned=False) == 255).all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("allowed", [True, False])
def test_copies_from_a_card_are_page_locked_if_that_is_allowed_in_few_blocks(monkeypatch, allowed):
    made, empty = [], module.block
    monkeypatch.setattr(module, "block", lambda size, pinned: made.append((size, pinned)) or empty(size, pinned))
    with as_if_on_a_card():
        tree = {"a": [torch.ones(1000, device="cuda"), torch.ones(70)], "b": torch.ones(3, device="cuda")}
        page_lock(allowed)
        try:
            copies = to_host(tree)
        finally:
            page_lock(True)
        assert [tensor.device.type for tensor in (*copies["a"], copies["b"])] == ["cpu"] * 3
    assert made == ([(4096, True), (256, True), (512, False)] if allowed else [(4352, False), (512, False)])
