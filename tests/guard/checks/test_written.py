"""Which tensors an optimizer's step may write, and what an update that is not finite does without copies of them."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from stabletrain.guard.checks.copies import same_memory
from stabletrain.guard.checks.update_check import Checked, UpdateCheck
from stabletrain.guard.checks.written import written_by
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import TrainState
from stabletrain.stability.clipping import NoClip
from stabletrain.stability.step_tools import StepTools


class Holder:
    """An object of a user's class, which holds a tensor."""

    def __init__(self):
        self.values = torch.ones(2)


def test_what_an_object_holds_is_written_only_where_the_object_is_the_optimizers_state():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.helper = Holder()
    optimizer.state[model.weight]["of_its_own"] = Holder()
    optimizer.state[model.weight]["of_torch"] = TensorDataset(torch.ones(2))
    written = written_by(model, optimizer)
    assert id(optimizer.state[model.weight]["of_its_own"].values) in written
    assert id(optimizer.helper.values) not in written
    assert id(optimizer.state[model.weight]["of_torch"].tensors[0]) not in written, "an update does not write it"
    assert {id(parameter) for parameter in model.parameters()} <= {*written}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (lambda tensor: tensor, True),
        (lambda tensor: tensor.clone(), False),
        (lambda tensor: tensor[:1], False),
        (lambda tensor: tensor.to_sparse(), False),
        (lambda tensor: tensor.double(), False),
    ],
)
def test_a_tensor_has_the_memory_it_had_only_with_the_same_shape_and_layout(other, same):
    tensor = torch.ones(3, 2)
    assert same_memory(other(tensor), tensor) is same


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("bad", [True, False])
def test_without_copies_a_bad_update_closes_the_gate_of_what_follows(is_open, bad):
    model = nn.Linear(2, 1)
    state = TrainState(model, torch.optim.Adagrad(model.parameters()))
    tools = Mock(spec=StepTools, clipping=NoClip(), parallel=SingleProcess())
    checked = Checked(UpdateCheck(), state, tools, None)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan if bad else 1.0
    assert checked.judge(torch.tensor(is_open)).item() is (is_open and not bad)
