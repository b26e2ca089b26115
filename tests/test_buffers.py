"""Buffers: saved and restored bit by bit, whatever their dtype and layout, and looked up again where they changed."""

import copy

import pytest
import torch
from torch import nn

from stabletrain.buffers import buffers_of

CLOSED, OPEN = torch.tensor(False), torch.tensor(True)


@pytest.mark.parametrize("open_", [False, True])
def test_buffers_of_every_shape_and_dtype_are_put_back_where_the_gate_is_closed(open_):
    model = torch.nn.Module()
    kinds = {
        "empty": torch.empty(0, 64),
        "count": torch.tensor(3),
        "mean": torch.randn(5),
        "images": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "narrow": torch.randn(3, 2).bfloat16().t(),
    }
    for name, value in kinds.items():
        model.register_buffer(name, value)
    before = {name: value.clone() for name, value in model.named_buffers()}
    held = buffers_of(model).save()
    for value in model.buffers():
        value.add_(1)
    buffers_of(model).restore_(held, torch.tensor(open_))
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name] + int(open_)), name
        assert value is kinds[name]


REPLACED = {
    "resized": torch.ones(4, 4),
    "of another dtype": torch.ones(2, 3, dtype=torch.float64),
    "not contiguous": torch.ones(3, 2).t(),
    "new": None,
}


@pytest.mark.parametrize("open_", [False, True])
@pytest.mark.parametrize("how", REPLACED)
def test_what_a_forward_pass_adds_or_resizes_is_left_and_the_rest_is_put_back(how, open_):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2))
    model[0].register_buffer("cache", torch.zeros(2, 3))
    held = buffers_of(model).save()
    for module in model:
        module.running_var.add_(1)
        module.num_batches_tracked.add_(1)
    if how == "new":
        model[0].register_buffer("more", torch.ones(2))
    else:
        model[0].cache = REPLACED[how].clone()
    now = buffers_of(model).restore_(held, torch.tensor(open_))
    for module in model:
        assert torch.equal(module.running_var, torch.full_like(module.running_var, 1.0 + open_))
        assert int(module.num_batches_tracked) == int(open_)
    if how == "new":
        assert torch.equal(model[0].more, torch.ones(2))
    else:
        put_back = how == "not contiguous" and not open_
        assert torch.equal(model[0].cache, torch.zeros(2, 3) if put_back else REPLACED[how])
    assert now.equal(buffers_of(model).save())


def test_saved_values_come_as_tensors_in_the_order_of_the_model():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2))
    model[1].register_buffer("grid", torch.arange(6.0).view(2, 3).t())
    expected = [value.clone() for value in model.buffers()]
    saved = buffers_of(model).save()
    for value in model.buffers():
        value.add_(1)
    for value, before in zip(saved.tensors(), expected, strict=True):
        assert torch.equal(value, before)
        assert value.dtype == before.dtype


def replaced(model):
    model.running_mean = torch.zeros(3)


def swapped(model):
    model.running_mean.data = torch.zeros(3)


def added(model):
    model.register_buffer("another", torch.zeros(3))


@pytest.mark.parametrize("change", [replaced, swapped, added])
def test_a_buffer_that_changed_its_memory_is_found(change):
    model = nn.BatchNorm1d(3)
    buffers_of(model)
    change(model)
    saved = buffers_of(model).save()
    for value in model.buffers():
        value.add_(1)
    buffers_of(model).restore_(saved, CLOSED)
    assert model.running_mean.tolist() == [0, 0, 0]
    assert all(torch.equal(value, before) for value, before in zip(model.buffers(), saved.tensors(), strict=True))


def test_buffers_are_looked_up_once_and_for_each_copy():
    model = nn.BatchNorm1d(3)
    assert buffers_of(model) is buffers_of(model)
    other = copy.deepcopy(model)
    saved = buffers_of(other).save()
    other.running_mean.add_(1)
    buffers_of(other).restore_(saved, CLOSED)
    assert other.running_mean.tolist() == model.running_mean.tolist() == [0, 0, 0]


def test_a_nan_is_restored_and_removed():
    """A product with the gate would keep it: 0 * NaN is NaN."""
    model = nn.BatchNorm1d(3)
    saved = buffers_of(model).save()
    model.running_mean.fill_(torch.nan)
    buffers_of(model).restore_(saved, OPEN)
    assert model.running_mean.isnan().all()
    buffers_of(model).restore_(saved, CLOSED)
    assert model.running_mean.tolist() == [0, 0, 0]


def test_a_model_without_buffers_has_nothing_to_restore():
    buffers = buffers_of(nn.Linear(2, 2))
    assert buffers.save().tensors() == buffers.judged == []
    buffers.restore_(buffers.save(), CLOSED)


def test_a_buffer_that_was_none_is_none_again():
    model = nn.Module()
    model.register_buffer("mean", None)
    saved = buffers_of(model).save()
    model.mean = torch.full((2,), torch.nan)
    saved.put_back()
    assert model.mean is None


class Tables(nn.Module):
    """A table that nothing writes, and a count."""

    constant_buffers = ("table", "missing")

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3).T)
        self.register_buffer("count", torch.zeros(2))


def test_a_constant_is_not_copied_and_neither_judged_nor_restored_by_the_gate():
    model = nn.Sequential(Tables(), nn.BatchNorm1d(3))
    buffers = buffers_of(model)
    assert {each.data_ptr() for each in buffers.judged}.isdisjoint({model[0].table.data_ptr()})
    saved = buffers.save()
    assert saved.memory is not None
    assert len(saved.memory) == 4 * 2 + 4 * 3 * 2 + 8
    model[0].count.add_(1)
    buffers.restore_(saved, CLOSED)
    assert model[0].count.tolist() == [0, 0]
    only = nn.Module()
    only.constant_buffers = ("table",)
    only.register_buffer("table", torch.ones(3))
    saved = buffers_of(only).save()
    assert (saved.memory, saved.others) == (None, [])


def test_a_constant_that_changed_is_found_named_and_put_back():
    model = nn.Sequential(nn.BatchNorm1d(3), Tables())
    before = buffers_of(model).save()
    assert before.equal(buffers_of(model).save())
    was = model[1].table.clone()
    model[1].table.data[2, 1] = -4.0
    after = buffers_of(model).save()
    assert not before.equal(after)
    names = [name for name, _ in model.named_buffers()]
    assert [names[at] for at in before.changed(after)] == ["1.table"]
    assert torch.equal(before.tensors()[names.index("1.table")], was)
    before.put_back(after.buffers)
    assert torch.equal(model[1].table, was)
    assert before.equal(buffers_of(model).save())
