"""Bad inputs and targets: found on the device, replaced so that kernels run, reported by the flag."""

import math
from dataclasses import replace

import pytest
import torch

from stabletrain.records import IGNORE_INDEX, Batch
from stabletrain.stability.sanitize import Sanitizer


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_finite_is_found(value, dtype):
    images = torch.zeros(2, 3, 4, 4, dtype=dtype)
    images[0, 0, 0, 0] = -3.0
    inputs, largest, bad = Sanitizer().inputs(images)
    assert inputs is images
    assert largest == 3.0
    assert not bad
    images[1, 2, 3, 0] = value
    inputs, _, bad = Sanitizer().inputs(images)
    assert bad
    assert inputs is images


@pytest.mark.parametrize("value", [-1, 10, 2**40])
def test_a_token_out_of_range_is_found_and_replaced(value):
    tokens = torch.arange(10).reshape(2, 5)
    same, _, bad = Sanitizer(10).inputs(tokens)
    assert not bad
    assert torch.equal(same, tokens)
    tokens[1, 1] = value
    inputs, _, bad = Sanitizer(10).inputs(tokens)
    assert bad
    assert inputs.flatten().tolist() == [0, 1, 2, 3, 4, 5, min(max(value, 0), 9), 7, 8, 9]
    assert tokens[1, 1] == value, "the batch itself stays as it is"


def test_tokens_are_not_checked_if_the_vocabulary_size_is_unknown():
    tokens = torch.tensor([[5, 10**9]])
    inputs, _, bad = Sanitizer(None).inputs(tokens)
    assert inputs is tokens
    assert not bad


@pytest.mark.parametrize("value", [-1, -101, 10, 10**6])
def test_a_label_out_of_range_is_found_and_not_counted(value):
    targets = torch.tensor([3, value, IGNORE_INDEX, 9])
    safe, bad = Sanitizer().targets(targets, 10)
    assert bad
    assert safe.tolist() == [3, IGNORE_INDEX, IGNORE_INDEX, 9]
    safe, bad = Sanitizer().targets(torch.tensor([0, IGNORE_INDEX, 9]), 10)
    assert not bad
    assert safe.tolist() == [0, IGNORE_INDEX, 9]


BATCHES = {
    "tokens": (torch.tensor([[0, 3], [9, 1]]), torch.tensor([[3, IGNORE_INDEX], [1, 9]])),
    "token too large": (torch.tensor([[0, 10], [9, 1]]), torch.tensor([[3, 4], [1, 9]])),
    "token below 0": (torch.tensor([[0, -1], [9, 1]]), torch.tensor([[3, 4], [1, 9]])),
    "target too large": (torch.tensor([[0, 1]]), torch.tensor([[3, 10]])),
    "target below 0": (torch.tensor([[0, 1]]), torch.tensor([[-1, IGNORE_INDEX]])),
    "no target": (torch.tensor([[0, 1]]), torch.tensor([[IGNORE_INDEX, IGNORE_INDEX]])),
    "images": (torch.tensor([[-3.5, 1.0]]), torch.tensor([4])),
    "bf16 images": (torch.tensor([[-3.5, 1.0]]).bfloat16(), torch.tensor([4], dtype=torch.uint8)),
    "NaN pixel": (torch.tensor([[math.nan, 1.0]]), torch.tensor([4])),
    "infinite pixel": (torch.tensor([[-math.inf, 1.0]]), torch.tensor([4])),
    "numbers": (torch.ones(2, 3), torch.tensor([[0.5], [9.0]])),
    "NaN number": (torch.ones(2, 3), torch.tensor([[0.5], [math.nan]])),
    "number too large": (torch.ones(2, 3), torch.tensor([[0.5], [9.5]])),
    "flags": (torch.ones(2, 3, dtype=torch.bool), torch.tensor([1, 2])),
    "complex": (torch.ones(2, 3, dtype=torch.complex64).real, torch.tensor([1, 2])),
    "none": (torch.ones(0, 3), torch.tensor([], dtype=torch.int64)),
}


def checked(batch, *, known):
    """What a sanitizer finds, as plain values."""
    ranges = (batch.input_range, batch.target_range) if known else (None, None)
    if not len(batch) and not known:  # the step leaves out an empty micro-batch
        return None
    inputs, largest, bad_inputs = Sanitizer(10).inputs(batch.inputs, ranges[0])
    targets, bad_targets = Sanitizer(10).targets(batch.targets, 10, ranges[1])
    values = [repr(tensor.tolist()) for tensor in (inputs, targets)]
    return (*values, targets.dtype, repr(float(largest)), bool(bad_inputs), bool(bad_targets))


@pytest.mark.parametrize("name", BATCHES)
def test_values_read_on_the_host_tell_the_same_as_a_look_on_the_device(name):
    batch = Batch(*BATCHES[name])
    plain, read = checked(batch, known=False), batch.examined()
    assert plain is None or checked(read, known=True) == plain
    assert read.known_count() in (batch.count_targets(), None)
    if len(batch) > 1:
        assert {part.counted for part in read.split(len(batch))} == {read.known_count()}


@pytest.mark.parametrize("name", ["tokens", "images", "numbers"])
def test_a_good_batch_from_the_host_needs_no_operation_on_the_device(name):
    batch = Batch(*BATCHES[name]).examined().moved(torch.device("meta"))  # without values: nothing can be read there
    (part,) = batch.split(1)
    for each in (part, *batch.split(len(batch))):
        inputs, largest, bad = Sanitizer(10).inputs(each.inputs, each.input_range)
        targets, bad_target = Sanitizer(10).targets(each.targets, 10, each.target_range)
        assert inputs is each.inputs
        assert targets is each.targets
        assert (largest, bad, bad_target) == ({"images": 3.5, "numbers": 1.0}.get(name, 0.0), False, False)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: (batch.inputs.fill_(11), batch)[1],
        lambda batch: (batch.targets.fill_(11), batch)[1],
        lambda batch: replace(batch, inputs=batch.inputs + 11),
        lambda batch: replace(batch, targets=batch.targets + 11),
        lambda batch: replace(batch, inputs=batch.inputs + 11).moved(torch.device("cpu")).split(2)[0],
        lambda batch: batch.having(batch.inputs + 11, batch.targets),
        lambda batch: batch.rows([0]).having(batch.inputs + 11, batch.targets),
    ],
)
def test_a_range_is_forgotten_once_its_tensor_is_another_or_was_written(change):
    batch = change(Batch(torch.tensor([[0, 3], [9, 1]]), torch.tensor([[3, 4], [1, 9]])).examined())
    assert True in checked(batch, known=True)
