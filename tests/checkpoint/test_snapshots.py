"""Snapshots: bit-exact, in few blocks, and on a card copied beside the training."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import nn

from benchmarks.fake_card import FakeStream, as_if_on_a_card
from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.host_copies import ALIGNED, host_copies, places, room
from stabletrain.checkpoint.snapshots import Snapshots
from stabletrain.checkpoint.tree import flatten
from stabletrain.records import TrainState


class Loss:
    """A part of the state with a tensor of its own."""

    def __init__(self, device="cpu"):
        self.scale = torch.full((), 8.0, device=device)

    def state_dict(self):
        return {"scale": self.scale, "count": 3}

    def load_state_dict(self, state):
        self.scale = state["scale"]


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5))
    return model.to(memory_format=torch.channels_last)


def stepped(model, device="cpu"):
    """A state after one update, so that there are moments."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model(torch.randn(4, 3, 3, 3, device=device)).square().mean().backward()
    optimizer.step()
    return TrainState(model, optimizer, 1)


def bits(tree):
    tensors, skeleton = flatten(tree)
    return {
        name: tensor.contiguous().flatten().view(torch.uint8).tolist() for name, tensor in tensors.items()
    }, skeleton


def test_a_snapshot_is_the_state_to_the_bit_and_in_one_block_of_its_own():
    state, part, snapshots = stepped(net()), Loss(), Snapshots()
    with torch.no_grad():
        state.model[3].weight[0, 0] = float("nan")
    state.model.register_buffer("nothing", torch.empty(0))
    state.model.register_buffer("short", torch.randn(3).bfloat16())
    before = bits(capture(state, {"loss": part}))
    snapshots.take(1, capture(state, {"loss": part}), state)
    kept = snapshots.newest(1)
    tensors, _ = flatten(kept)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert all(tensor.data_ptr() % 16 == 0 and tensor.is_contiguous() for tensor in tensors.values() if tensor.numel())
    with torch.no_grad():
        for tensor in [*state.model.parameters(), *state.model.buffers(), part.scale]:
            tensor.zero_()
    assert bits(kept) == before, "the snapshot shares no memory with the state"
    restore(kept, state, {"loss": part})
    assert bits(capture(state, {"loss": part})) == before


GPT2 = [4 * n for n in [50257 * 768, 1024 * 768, *([768] * 4 + [768 * 768] * 4 + [4 * 768 * 768] * 2) * 12, 768]]
"""Bytes of the weights of GPT-2."""


@pytest.mark.parametrize("sizes", [GPT2 * 3 + [4] * len(GPT2), [7], [1000, 300, 300, 300], [0, 0], []], ids=len)
@pytest.mark.parametrize("rounded", [True, False])
def test_tensors_lie_apart_in_blocks_without_waste(sizes, rounded):
    sizes = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    blocks, where = places(sizes, rounded)
    taken = {}
    for size, (block, start) in zip(sizes, where, strict=True):
        assert start % ALIGNED == 0
        assert start + size <= blocks[block]
        taken.setdefault(block, []).append((start, start + size))
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


def test_room_is_enough_for_every_dtype_and_shape():
    tensors = [torch.zeros(3, dtype=torch.bool), torch.zeros((), dtype=torch.int64), torch.zeros(2, 0), torch.zeros(65)]
    copies = host_copies(tensors)
    assert [(copy.shape, copy.dtype) for copy in copies] == [(tensor.shape, tensor.dtype) for tensor in tensors]
    assert [room(tensor) for tensor in tensors] == [ALIGNED, ALIGNED, 0, 2 * ALIGNED]


@contextmanager
def state_on_a_card():
    """A state as if on a card, after one update, and the card."""
    with as_if_on_a_card() as card:
        model = net().to("cuda")
        state = stepped(model, "cuda")
        card.restart()
        yield card, state


def test_on_a_card_the_next_update_waits_for_the_copy_and_nothing_before_it(monkeypatch):
    """The forward and backward passes run beside the copy; so the buffers, which they write, are copied before."""
    waited, wait_event = [], FakeStream.wait_event
    with state_on_a_card() as (card, state):
        monkeypatch.setattr(FakeStream, "wait_event", lambda *given: waited.append(1) or wait_event(*given))
        snapshots = Snapshots()
        snapshots.take(1, capture(state, {"loss": Loss("cuda")}), state)
        assert len(card.copied) == 6 + 6 * 3, "parameters and moments, but no buffer and no loss scale"
        state.model.zero_grad()
        state.model(torch.randn(4, 3, 3, 3, device="cuda")).square().mean().backward()
        assert not waited
        with pytest.raises(RuntimeError, match="another stream is copying"), torch.no_grad():
            state.model[3].weight.mul_(2)
        state.optimizer.step()
        assert waited == [1]
        assert not card.copied
        state.optimizer.step()
        assert waited == [1], "the next ones do not"
        snapshots.take(2, capture(state, {}), state)
        state.optimizer.step()
        assert waited == [1, 1], "one hook, however many snapshots"


def test_on_a_card_a_restored_snapshot_is_complete(monkeypatch):
    with state_on_a_card() as (_, state):
        synchronized = []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(1))
        snapshots = Snapshots()
        snapshots.take(4, capture(state, {}), state)
        assert not synchronized
        assert snapshots.newest(3) is None
        assert synchronized == [1], "the state is about to be restored from disk: the snapshot must be complete first"
        assert snapshots.newest(4) is not None
        assert synchronized == [1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_real_card_the_next_updates_do_not_reach_the_snapshot():
    model = nn.Linear(4096, 4096, bias=False, device="cuda")  # 64 MiB: the copy takes longer than an update
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state, snapshots = TrainState(model, optimizer, 1), Snapshots()
    before = {name: tensor.cpu() for name, tensor in flatten(capture(state, {}))[0].items()}
    for step in range(1, 4):
        snapshots.take(step, capture(state, {}), state)
        for _ in range(5):
            optimizer.step()
        kept, _ = flatten(snapshots.newest(step))
        assert all(tensor.is_pinned() for tensor in kept.values())
        assert all(torch.equal(kept[name], tensor) for name, tensor in before.items())
        before = {name: tensor.cpu() for name, tensor in flatten(capture(state, {}))[0].items()}
        snapshots.retain([])
