"""Which tensors an optimizer's step may write."""

import torch
from torch import nn

from stabletrain.guard.checks.written import written_by


class Holder:
    """An object of a user's class, which holds a tensor."""

    def __init__(self):
        self.values = torch.ones(2)


def test_what_an_object_holds_is_written_only_where_the_object_is_the_optimizers_state():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.helper = Holder()
    optimizer.state[model.weight]["of_its_own"] = Holder()
    written = written_by(model, optimizer)
    assert id(optimizer.state[model.weight]["of_its_own"].values) in written
    assert id(optimizer.helper.values) not in written
    assert {id(parameter) for parameter in model.parameters()} <= {*written}
