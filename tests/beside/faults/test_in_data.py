"""Bad data: only at the planned positions of training, and without changing the data set itself."""

import pytest
import torch

from stabletrain.beside.faults import Empty, Ignored, Input, Label, Plan, Poison
from stabletrain.beside.faults.plan import KINDS
from stabletrain.extension import NoFaults
from stabletrain.records import IGNORE_INDEX
from tests.beside.faults.given import INF, NAN, Images, Tokens


def test_one_value_of_one_image_is_bad_and_the_data_stays_as_it_was():
    data = Images()
    for value in (NAN, INF, -INF, 7.0):
        spoilt = Input(at=[3], value=value).data(data)
        batch = spoilt.batch(3, 4, "train")
        changed = batch.inputs != data.given.inputs
        assert changed.sum() == 1
        assert str(float(batch.inputs[changed])) == str(value)
        assert torch.equal(batch.targets, data.given.targets)
    assert torch.equal(data.given.inputs, torch.ones(4, 1, 3, 3))


def test_one_token_is_far_out_of_range():
    for value, written in ((NAN, 2**31 - 1), (INF, 2**31 - 1), (5.0, 5)):
        inputs = Input(at=[3], value=value).data(Tokens()).batch(3, 2, "train").inputs
        assert inputs.dtype == torch.int64
        assert sorted(inputs.flatten().tolist()) == [1] * 9 + [written]


def test_one_label_is_out_of_range():
    for value in (10**6, -1):
        data = Tokens()
        targets = Label(at=[3], value=value).data(data).batch(3, 2, "train").targets
        changed = targets != data.given.targets
        assert changed.sum() == 1
        assert targets[changed].item() == value


def test_ignored_has_no_valid_target_and_empty_has_no_sample():
    batch = Ignored(at=[3]).data(Tokens()).batch(3, 2, "train")
    assert (batch.targets == IGNORE_INDEX).all()
    assert batch.targets.shape == (2, 5)
    batch = Empty(at=[3]).data(Images()).batch(3, 4, "train")
    assert batch.inputs.shape == (0, 1, 3, 3)
    assert (len(batch.targets), len(batch.ids), len(batch.sources)) == (0, 0, 0)


def test_poison_is_valid_and_wrong_everywhere():
    batch = Poison(at=[3], factor=10.0).data(Images()).batch(3, 4, "train")
    assert torch.equal(batch.inputs, torch.full((4, 1, 3, 3), 10.0))
    assert (batch.targets != torch.tensor([0, 1, 2, 4])).all()
    assert ((batch.targets >= 0) & (batch.targets < 5)).all()
    tokens = Tokens()
    batch = Poison(at=[3]).data(tokens).batch(3, 2, "train")
    assert torch.equal(batch.inputs, tokens.given.inputs)
    same = batch.targets == tokens.given.targets
    assert same.nonzero().tolist() == [[1, 1]]  # what is ignored stays so
    assert batch.targets.max() < 7


@pytest.mark.parametrize("kind", ["input", "label", "ignored", "empty", "poison"])
def test_bad_data_lies_at_its_positions_of_training_and_nowhere_else(kind):
    data = Tokens()
    spoilt = KINDS[kind](at=[3, 6]).data(data)
    bad = [position for position in range(10) if spoilt.batch(position, 2, "train") is not data.given]
    assert bad == [3, 6]
    assert all(spoilt.batch(position, 2, "val") is data.given for position in range(10))


def test_poison_goes_on_for_its_length():
    data = Tokens()
    spoilt = Poison(at=[3, 8], length=2).data(data)
    assert [p for p in range(12) if spoilt.batch(p, 2, "train") is not data.given] == [3, 4, 8, 9]


def test_a_position_gives_the_same_bad_batch_every_time_and_another_seed_another():
    def batch(kind, seed):
        found = KINDS[kind](at=[3], seed=seed).data(Tokens()).batch(3, 2, "train")
        return torch.stack([found.inputs, found.targets]).tolist()

    for kind in ("input", "label", "poison"):
        assert batch(kind, 0) == batch(kind, 0)
        assert len({str(batch(kind, seed)) for seed in range(6)}) > 1


def test_attributes_are_those_of_the_data():
    spoilt = Plan([{"kind": "input", "at": [1]}, {"kind": "label", "at": [1]}]).data(Tokens())
    assert spoilt.decode([1]) == "text"
    assert spoilt.vocab_size == 7
    for name in ("encode", "prompt", "batches", "fingerprint", "num_classes", "summary"):
        assert not hasattr(spoilt, name)
    assert not hasattr(NoFaults().data(Images()), "decode")
