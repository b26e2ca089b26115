"""log Z of known logits."""

import math

import pytest
import torch

from stabletrain.monitors import forward
from stabletrain.monitors.forward import log_z
from stabletrain.records import IGNORE_INDEX


@pytest.mark.parametrize("values", [1, 10, 2**24])
def test_known_logits_in_parts_of_any_size(monkeypatch, values):
    monkeypatch.setattr(forward, "VALUES", values)
    made = torch.full((2, 3, 4), -7.0)
    made[0, 1] = 5.0
    mean, largest = log_z(made, torch.zeros(2, 3, dtype=torch.int64))
    assert largest.item() == pytest.approx(5 + math.log(4))
    assert mean.item() == pytest.approx(-5 + math.log(4))


def test_ignored_targets_are_left_out():
    made = torch.tensor([[1.0, 1.0], [900.0, 900.0], [3.0, 3.0]])
    mean, largest = log_z(made, torch.tensor([0, IGNORE_INDEX, 1]))
    assert mean.item() == pytest.approx(2 + math.log(2))
    assert largest.item() == pytest.approx(3 + math.log(2))


def test_bf16_logits_are_summed_in_fp32():
    made = torch.zeros(1, 1000, dtype=torch.bfloat16)
    mean, _ = log_z(made, torch.zeros(1, dtype=torch.int64))
    assert mean.item() == pytest.approx(math.log(1000), rel=1e-6)
