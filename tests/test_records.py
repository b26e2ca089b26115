"""The records of a step: splitting and moving batches, and adding loss terms."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stabletrain.records import IGNORE_INDEX, Batch, LossTerms, TrainState, Transform
from tests.devices import CARD


@pytest.fixture
def batch():
    """Six samples that can be told apart by their tokens, targets, ids and sources."""
    tokens = torch.arange(6)[:, None] * 10 + torch.arange(4)
    return Batch(tokens, tokens + 1, torch.arange(6) + 100, [f"file:{i}" for i in range(6)], counted=99)


def test_its_length_is_the_number_of_samples(batch):
    assert len(batch) == 6
    assert len(batch.rows(slice(4, 9))) == 2


def test_rows_of_every_part_belong_together(batch):
    part = batch.rows(slice(1, 3))
    assert part.inputs[:, 0].tolist() == [10, 20]
    assert part.targets[:, 0].tolist() == [11, 21]
    assert part.ids.tolist() == [101, 102]
    assert part.sources == ["file:1", "file:2"]
    assert part.counted == 99, "targets are counted over the whole batch"


def test_what_the_data_cannot_say_stays_unsaid(batch):
    part = Batch(batch.inputs, batch.targets).rows(slice(2))
    assert (part.ids, part.sources, part.counted) == (None, None, None)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_micro_batches_are_equal_in_size_and_together_the_batch(batch, parts):
    cut = batch.split(parts)
    assert [len(part) for part in cut] == [6 // parts] * parts
    assert torch.equal(torch.cat([part.inputs for part in cut]), batch.inputs)
    assert torch.equal(torch.cat([part.targets for part in cut]), batch.targets)
    assert torch.cat([part.ids for part in cut]).tolist() == batch.ids.tolist()
    assert [source for part in cut for source in part.sources] == batch.sources
    assert {part.counted for part in cut} == {99}


@pytest.mark.parametrize("parts", [4, 7])
def test_a_batch_that_does_not_divide_is_refused(batch, parts):
    with pytest.raises(ValueError, match=f"a batch of 6 samples does not divide into {parts} micro-batches"):
        batch.split(parts)


@pytest.mark.parametrize("device", ["meta", CARD])
def test_inputs_and_targets_move_and_ids_stay_on_the_host(batch, device):
    moved = batch.to(torch.device(device))
    assert (moved.inputs.device.type, moved.targets.device.type) == (device, device)
    assert moved.ids is batch.ids
    assert (moved.sources, moved.counted) == (batch.sources, 99)
    assert batch.inputs.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_is_pinned_on_the_host_only(batch):
    pinned = batch.pin_memory()
    assert pinned.inputs.is_pinned()
    assert pinned.targets.is_pinned()
    assert torch.equal(pinned.inputs, batch.inputs)
    card = batch.to(torch.device("cuda"))
    assert card.pin_memory() is card


def test_a_part_of_a_batch_knows_how_many_targets_count(batch):
    assert batch.counting(7).counted == 7
    assert batch.counting(7).inputs is batch.inputs
    assert batch.counted == 99


def test_it_cannot_be_written_to(batch):
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.inputs = batch.targets


def test_parts_of_the_loss_add_up_each_with_its_own():
    first = LossTerms(torch.tensor(1.0), {"ce": torch.tensor(2.0), "zloss": 3.0})
    summed = first + LossTerms(torch.tensor(10.0), {"ce": torch.tensor(20.0), "kl": torch.tensor(5.0)})
    assert float(summed.total) == 11
    assert {name: float(part) for name, part in summed.parts.items()} == {"ce": 22, "zloss": 3, "kl": 5}


def test_detached_terms_keep_their_values_and_lose_their_graph():
    weight = torch.tensor(2.0, requires_grad=True)
    terms = LossTerms(weight * 3, {"ce": weight * 2, "zloss": 1.0})
    found = terms.detach()
    assert [float(each) for each in (found.total, found.parts["ce"], found.parts["zloss"])] == [6, 4, 1]
    assert not found.total.requires_grad
    assert not found.parts["ce"].requires_grad
    assert terms.total.requires_grad


def test_two_states_do_not_share_what_they_skip():
    model = torch.nn.Linear(1, 1)
    one, other = (TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2))
    one.skipped.append((1, 2))
    assert other.skipped == []


# ---- a transform


def raw(transform=lambda inputs, each: inputs.float() + each[:, :1] / 2):
    """Six samples whose transform adds half their own number."""
    inputs = torch.arange(6, dtype=torch.uint8)[:, None] * 10 + torch.arange(4, dtype=torch.uint8)
    return Batch(inputs, torch.arange(6), transform=Transform(transform, torch.arange(12).view(6, 2)))


def test_a_transform_is_applied_once_where_the_inputs_go():
    places = []

    def noting(inputs, each):
        places.append((inputs.device.type, each.device.type))
        return inputs.float()

    moved = raw(noting).to(torch.device("meta"))
    assert places == [("meta", "meta")]
    assert moved.inputs.dtype == torch.float32
    assert moved.transform is None
    assert moved.to(torch.device("meta")).transformed().inputs is not None
    assert len(places) == 1


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_part_is_transformed_with_its_own_numbers(parts):
    whole = raw().transformed()
    assert whole.inputs[:, 0].tolist() == [0, 11, 22, 33, 44, 55]
    assert torch.equal(torch.cat([part.transformed().inputs for part in raw().split(parts)]), whole.inputs)
    assert torch.equal(raw().shard(slice(2, 5)).transformed().inputs, whole.inputs[2:5])


def test_a_batch_without_a_transform_is_complete(batch):
    assert batch.transformed() is batch


def test_a_shard_counts_the_targets_of_the_whole_batch():
    batch = Batch(torch.zeros(4, 1), torch.tensor([1, IGNORE_INDEX, 0, 2]))
    part = batch.shard(slice(1, 3))
    assert part.targets.tolist() == [IGNORE_INDEX, 0]
    assert part.counted == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_transform_gives_the_same_bits_on_a_card():
    from stabletrain.data.augment import CropFlip, Finish

    finish = Finish(CropFlip(16), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    images = torch.randint(256, (64, 3, 16, 16), dtype=torch.uint8)
    chosen = finish.augment.chosen(torch.rand(64, 3, dtype=torch.float64).numpy())
    batch = Batch(images, torch.zeros(64, dtype=torch.int64), transform=Transform(finish, chosen))
    card = torch.device("cuda")
    assert torch.equal(batch.pin_memory().to(card).inputs.cpu(), batch.transformed().inputs)
    assert torch.equal(batch.pin_memory().transform.each, chosen)


def test_valid_targets_are_counted_on_the_device_as_on_the_host():
    ids = torch.tensor([[1, IGNORE_INDEX], [2, 3]])
    for targets in (ids, torch.full((2, 2), IGNORE_INDEX), torch.rand(3)):
        batch = Batch(torch.zeros(len(targets), 2), targets)
        assert batch.n_valid().shape == ()
        assert batch.n_valid().item() == max(batch.count_targets(), 1)
    with FakeTensorMode():  # reading a value of a fake tensor fails
        Batch(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.int64)).n_valid()
