"""A copy of a model is its own, whatever the model's attributes hold."""

import threading

import pytest
import torch
from torch import nn

from stabletrain.forensics.repro import copy_of_model


class Hoarder(nn.Module):
    """A user's module with things in its attributes that are no parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.lock, self.kept, self.calls, self.list = threading.Lock(), None, 0, []
        self.layer.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x):
        self.calls += 1
        self.kept = self.layer(x)
        self.list.append(self.kept)
        return self.kept


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "plain"])
def test_a_copy_is_its_own_whatever_the_attributes_hold(locked):
    model = Hoarder()
    if not locked:
        del model.lock
    model(torch.ones(2, 3)).sum().backward()
    gradient = model.layer.weight.grad.clone()
    model.compile(backend="eager")
    model_copy = copy_of_model(model)
    assert model_copy._compiled_call_impl is None
    assert model._compiled_call_impl is not None
    assert model_copy.layer.weight.grad is None
    with torch.no_grad():
        model_copy.layer.weight.zero_()
    model_copy(torch.ones(2, 3)).sum().backward()
    assert (model.calls, len(model.list), model_copy.calls) == (1, 1, 2)
    assert torch.equal(model.layer.weight.grad, gradient)
    assert bool((model.layer.weight != 0).all())
    assert torch.equal(model_copy.layer.weight.grad, gradient), "the hook doubles it here too"
    if locked:
        assert model_copy.lock is model.lock
