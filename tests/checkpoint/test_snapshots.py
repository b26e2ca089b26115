"""Snapshots: bit-exact, in few blocks, and on a card copied beside the training."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from stabletrain.checkpoint import host_copies
from stabletrain.checkpoint import snapshots as snapshots_module
from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.snapshots import Snapshots, choose_memory, state_bytes
from stabletrain.checkpoint.tree import flatten
from stabletrain.records import TrainState
from tests.tools.fake_card import FakeStream, as_if_on_a_card


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


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_bytes_of_a_snapshot_are_known_before_the_first_update_but_for_the_step_counters(optimizer):
    model = net()
    state = TrainState(model, optimizer(model.parameters()), 0)
    estimated = state_bytes(state)
    model(torch.randn(4, 3, 3, 3)).square().mean().backward()
    state.optimizer.step()
    tensors = flatten(capture(state, {}))[0]
    counters = sum(name.endswith("/step") for name in tensors)
    snapshots = Snapshots()
    snapshots.take(1, capture(state, {}), state)
    block = next(iter(flatten(snapshots.newest(1))[0].values())).untyped_storage().nbytes()
    assert state_bytes(state) == block == estimated + counters * host_copies.ALIGNED


def test_an_optimizer_that_says_nothing_of_its_moments_is_taken_to_keep_one():
    model = net()
    without, unknown = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adadelta(model.parameters())
    moments = state_bytes(TrainState(model, unknown)) - state_bytes(TrainState(model, without))
    assert moments == sum(host_copies.room(parameter) for parameter in model.parameters())


def test_a_snapshot_is_reached_from_its_step_on():
    state, snapshots = stepped(net()), Snapshots()
    snapshots.take(3, capture(state, {}), state)
    assert [snapshots.reaches(step) for step in (2, 3, 4)] == [False, True, True]


@pytest.fixture
def blocks(monkeypatch):
    """Whether each block that was made is page-locked."""
    made, block = [], host_copies.block
    monkeypatch.setattr(host_copies, "block", lambda size, pinned: made.append(pinned) or block(size, pinned))
    monkeypatch.setattr(host_copies, "_PAGE_LOCKED", [True])
    return made


CHOICE = {"snapshots": 4, "checkpoints": 1, "ranks": 8, "fix": "lower guard.snapshots"}


def test_snapshots_that_fit_into_the_host_are_page_locked_and_others_are_pageable_and_that_is_said(blocks, monkeypatch):
    with state_on_a_card() as (_, state):
        needed, snapshots = state_bytes(state) * (8 * 4 + 1), Snapshots()
        elsewhere = lambda _: True  # noqa: E731
        for free, any_rank, pinned in ((needed, bool, True), (needed - 1, bool, False), (needed, elsewhere, False)):
            line = choose_memory(state, free=free, any_rank=any_rank, **CHOICE)
            assert bool(line) == (free < needed), "another machine says itself that it has too little"
            blocks.clear()
            snapshots.take(1, capture(state, {}), state)
            assert set(blocks) == {pinned}
            state.optimizer.step()
        monkeypatch.setattr(snapshots_module, "state_bytes", lambda state: 15_600_000_000)
        line = choose_memory(state, free=420e9, **CHOICE)
    assert line == (
        "memory   33 copies of the state for rollbacks and checkpoints, 15.6 GB each, need 515 GB of host memory, but "
        "420 GB are free: they are kept in pageable memory, and training waits for each copy. fix: "
        "lower guard.snapshots"
    )


def test_on_the_host_too_little_memory_is_said_too():
    line = choose_memory(stepped(net()), free=0.0, **CHOICE)
    assert line.endswith("but 0 GB are free: the run may be killed. fix: lower guard.snapshots")


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


def test_on_a_card_a_loop_that_writes_weights_itself_waits_for_the_copy_at_once(monkeypatch):
    waited, wait_event = [], FakeStream.wait_event
    with state_on_a_card() as (card, state):
        monkeypatch.setattr(FakeStream, "wait_event", lambda *given: waited.append(1) or wait_event(*given))
        Snapshots().take(1, capture(state, {}), state, only_optimizer_writes=False)
        assert not card.copied
        with torch.no_grad():
            state.model[3].weight.clamp_(-1, 1)
        state.model.zero_grad()
        state.model(torch.randn(4, 3, 3, 3, device="cuda")).square().mean().backward()
        state.optimizer.step()
        assert waited == [1]


def test_on_a_card_the_stream_that_waits_is_that_of_the_models_device(monkeypatch):
    asked = []
    with state_on_a_card() as (_, state):
        current = torch.cuda.current_stream
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: asked.append(device) or current(*device))
        Snapshots().take(1, capture(state, {}), state)
        state.optimizer.step()
    assert set(asked) == {(torch.device("cuda", 0),)}, "the loop may have chosen another device"


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
