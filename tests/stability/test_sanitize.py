"""Bad inputs and targets: found on the device, replaced so that kernels run, reported by the flag."""

import math

import pytest
import torch

from stabletrain.records import IGNORE_INDEX
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
