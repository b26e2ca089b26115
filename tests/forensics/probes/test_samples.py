"""Which samples are bad, in words: index, id, source, value, place, bound."""

import math

import pytest
import torch

from stabletrain.forensics.probes.samples import bad_samples, describe
from stabletrain.records import IGNORE_INDEX, Batch


def images(n=3):
    return Batch(torch.zeros(n, 1, 2, 2), torch.arange(n), torch.arange(n) + 40, [f"file:{i}" for i in range(n)])


def test_a_pixel_is_named_by_sample_id_source_and_place():
    batch = images()
    batch.inputs[1, 0, 1, 0] = math.nan
    batch.inputs[1, 0, 1, 1] = math.inf
    (found,) = bad_samples(batch, None, 10)
    assert found == {
        "index": 1,
        "id": 41,
        "source": "file:1",
        "fault": "input",
        "what": "input holds 2 of 4 values that are NaN or Inf, the first at [0, 1, 0]",
    }
    assert describe([found]) == f"sample 1 of the batch: {found['what']} (file:1)"


def test_a_label_and_a_token_are_named_with_their_bound():
    batch = images()
    batch.targets[2] = 77
    assert [each["what"] for each in bad_samples(batch, None, 10)] == ["target 77 is outside [0, 10)"]
    text = Batch(torch.tensor([[1, 300], [2, 3]]), torch.tensor([[0, 1], [-5, 1]]))
    first, second = bad_samples(text, 256, 256)
    assert first == {"index": 0, "fault": "input", "what": "token 300 at [1] is outside [0, 256)"}
    assert second == {"index": 1, "fault": "label", "what": "target -5 at [0] is outside [0, 256)"}


def test_faults_of_the_whole_batch():
    assert bad_samples(images(0), None, None) == [{"index": None, "fault": "empty", "what": "the batch is empty"}]
    batch = images()
    batch.targets[:] = IGNORE_INDEX
    (found,) = bad_samples(batch, None, 10)
    assert (found["index"], found["what"]) == (None, "every target is -100, so none counts")


def test_a_good_batch_has_none_and_a_long_list_is_cut():
    assert bad_samples(images(), None, 10) == []
    assert "looks bad on the host" in describe([])
    many = images(20)
    many.inputs[:] = math.nan
    found = bad_samples(many, None, None)
    assert len(found) == 8
    assert describe(found).endswith("(file:0), and 7 more")


@pytest.mark.parametrize("vocab_size", [None, 256])
def test_data_without_ids_or_sources_is_named_by_its_place(vocab_size):
    batch = Batch(torch.full((1, 4), math.nan), torch.zeros(1, dtype=torch.int64))
    assert bad_samples(batch, vocab_size, 10)[0].keys() == {"index", "fault", "what"}
