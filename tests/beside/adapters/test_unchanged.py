"""What a rerun may change of the user's objects, and what is put back."""

import pytest
import torch
from torch import nn

from stabletrain.beside.adapters.callback import LARGEST_COPIED, do_nothing, replaced, unchanged


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.count, self.total = 0, torch.zeros(3)
        self.seen = {"losses": [1.0], "names": {"a"}}
        self.data = torch.zeros(LARGEST_COPIED + 1)


def test_counters_lists_and_small_tensors_are_as_before():
    holder = Holder()
    total, seen, data, weight = holder.total, holder.seen, holder.data, holder.layer.weight
    with pytest.raises(ValueError, match="an error"), unchanged(*holder.modules()):  # noqa: PT012
        holder.count += 1
        holder.total += 1
        holder.seen["losses"].append(2.0)
        holder.seen["names"].add("b")
        holder.new = "value"
        assert holder.data is data, "no second copy of a data set"
        assert holder.layer.weight is weight
        raise ValueError("an error")
    assert (holder.count, holder.seen) == (0, {"losses": [1.0], "names": {"a"}})
    assert torch.equal(holder.total, torch.zeros(3))
    assert holder.total is total
    assert holder.seen is seen
    assert not hasattr(holder, "new")


def test_a_method_is_replaced_on_one_object_only():
    one, other = Holder(), Holder()
    first = replaced(one, "forward", do_nothing)
    second = replaced(one, "forward", max)
    assert one.forward is max
    assert other.forward is not max
    second()
    assert one.forward is do_nothing
    first()
    assert "forward" not in vars(one)
