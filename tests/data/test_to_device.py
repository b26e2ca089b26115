"""Batches on their way to the device: the same bits, and on a card copied beside the computation."""

import pytest
import torch

from stabletrain.data.batches import ToDevice
from stabletrain.records import Batch, Transform
from tests.tools.fake_card import CARD, FakeStream, as_if_on_a_card


def batch(transform=None):
    return Batch(torch.arange(12, dtype=torch.uint8).view(6, 2), torch.arange(6), transform=transform)


def added(inputs, each):
    return inputs.float() + each


def raw():
    return batch(Transform(added, torch.arange(6.0)[:, None]))


@pytest.mark.parametrize("given", [batch, raw])
def test_on_the_host_it_is_the_batch_itself_transformed(given):
    moved = ToDevice(torch.device("cpu"))(given())
    assert torch.equal(moved.inputs, given().transformed().inputs)
    assert torch.equal(moved.targets, given().targets)
    assert moved.transform is None


@pytest.mark.parametrize("given", [batch, raw])
def test_on_a_card_it_is_copied_from_page_locked_memory_on_another_stream_and_then_waited_for(given):
    with as_if_on_a_card() as card:
        to_device = ToDevice(CARD)
        for _ in range(2):
            moved = to_device(given())
            assert {moved.inputs.device, moved.targets.device} == {CARD}
            assert not card.arriving
            assert (moved.inputs.float() + 1).sum().is_cuda, "nothing is in the way of the computation"


def test_a_batch_that_is_not_waited_for_or_not_page_locked_would_be_noticed(monkeypatch):
    with as_if_on_a_card():
        to_device = ToDevice(CARD)
        monkeypatch.setattr(FakeStream, "wait_event", lambda *_: None)
        with pytest.raises(RuntimeError, match="uses a tensor that another stream is writing"):
            to_device(raw())
        moved = to_device(batch())
        with pytest.raises(RuntimeError, match="uses a tensor that another stream is writing"):
            moved.inputs + 1
        monkeypatch.setattr(Batch, "pin_memory", lambda self: self)
        with pytest.raises(RuntimeError, match="copies from pageable memory"):
            to_device(batch())


def test_a_batch_that_was_made_on_the_card_is_not_copied():
    with as_if_on_a_card() as card:
        made = Batch(torch.zeros(2, 3, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda"))
        assert ToDevice(CARD)(made).inputs is made.inputs
        assert not card.arriving


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_real_card_each_batch_is_complete_when_the_computation_uses_it():
    to_device, card = ToDevice(torch.device("cuda")), torch.device("cuda")
    busy = torch.randn(4096, 4096, device=card)
    for number in range(20):
        inputs = torch.full((2**22,), float(number))
        for _ in range(5):
            busy = (busy @ busy).clamp(-1, 1)  # the host is ahead, and memory of earlier batches is used again
        moved = to_device(Batch(inputs, inputs.long()))
        assert torch.equal((moved.inputs + 1).cpu(), inputs + 1)
