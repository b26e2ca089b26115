"""Checksums: every change is found and its tensor named, whatever the layout in memory."""

import pytest
import torch

from stabletrain import checksums
from stabletrain.checksums import ROW_BYTES, Checksums


def tensors(large=False):
    """Returns tensors of several dtypes and layouts; with `large`, one that is summed where it lies."""
    generator = torch.Generator().manual_seed(0)
    made = {
        "matrix": torch.randn(40, 60, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "count": torch.zeros(()),
        "kernel": torch.randn(6, 5, 3, 3, generator=generator).to(memory_format=torch.channels_last),
        "columns": torch.randn(10, 20, generator=generator)[:, ::2],
        "mask": torch.zeros(7, dtype=torch.bool),
    }
    return made | ({"large": torch.randn(20_001, generator=generator)} if large else {})


def differing(before, after, found):
    return found.changed(before.tolist(), after.tolist())


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_flip_of_any_single_bit_is_found_and_its_tensor_named(large):
    made = tensors(large)
    found = Checksums(made)
    before = found.sums()
    names = ["large"] if large else list(made)
    for name in names:
        tensor = made[name]
        for index in {0, tensor.numel() // 2, tensor.numel() - 1}:
            value = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), value.shape))
            bit = 0 if tensor.dtype == torch.bool else index % 8
            value[place] ^= 1 << bit
            after = found.sums()
            assert not torch.equal(before, after), (name, index, bit)
            # 8 bytes are summed together, so the neighbour of a small tensor may be named with it
            assert name in [each[0] for each in differing(before, after, found)]
            assert len(differing(before, after, found)) <= 3
            value[place] ^= 1 << bit
    assert torch.equal(before, found.sums())


@pytest.mark.parametrize("size", [(40, 60), (512, 1024)], ids=["small", "large"])
def test_values_that_change_places_are_found(size):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0))
    found = Checksums({"weight": weight, "other": torch.ones(5)})
    before = found.sums()
    weight[[0, 1]] = weight[[1, 0]]
    assert "weight" in [name for name, _, _ in differing(before, found.sums(), found)]
    weight[[0, 1]] = weight[[1, 0]]
    assert torch.equal(before, found.sums())
    weight[0, [0, 2]] = weight[0, [2, 0]]  # within a row of the grid: only sums of columns differ
    assert "weight" in [name for name, _, _ in differing(before, found.sums(), found)]


def test_the_rows_that_differ_say_where_a_tensor_changed():
    weight = torch.zeros(1_000_000)
    found = Checksums({"first": torch.zeros(10), "weight": weight})
    before = found.sums()
    weight[123_456] = 1.0
    ((name, start, stop),) = differing(before, found.sums(), found)
    assert name == "weight"
    assert start <= 4 * 123_456 < stop
    assert stop - start == 8


def test_large_tensors_are_not_copied(monkeypatch):
    weight, given = torch.zeros(1_000_000), []
    found = Checksums({"weight": weight, "bias": torch.zeros(3)})
    cat = torch.cat
    monkeypatch.setattr(checksums.torch, "cat", lambda parts, **named: given.extend(parts) or cat(parts, **named))
    found.sums()
    assert sum(part.numel() for part in given) <= 2 * ROW_BYTES


def test_replaced_tensors_are_noticed():
    made = tensors()
    found = Checksums(made)
    assert found.are_of(dict(made))
    assert not found.are_of(made | {"count": torch.zeros(())})
    assert not found.are_of({name: made[name] for name in list(made)[1:]})
