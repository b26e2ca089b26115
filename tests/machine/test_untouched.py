"""Code inside `untouched` and `evaluating` leaves no trace in a model."""

import numpy as np
import torch
from torch import nn

from stabletrain.machine.untouched import evaluating, put_back_attributes, untouched


def drawn():
    """Random numbers of PyTorch and NumPy; beartype itself draws from Python's generator."""
    return torch.rand(()).item(), np.random.rand()


def test_buffers_gradients_attributes_and_generators_are_as_before():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    held = [parameter.grad for parameter in model.parameters()]
    mean, before = model[1].running_mean, [buffer.clone() for buffer in model.buffers()]
    torch.manual_seed(0), np.random.seed(0)
    expected = drawn()
    torch.manual_seed(0), np.random.seed(0)
    try:
        with untouched(model, torch.device("cpu")):
            assert all(parameter.grad is None for parameter in model.parameters())
            model(torch.randn(4, 2)).sum().backward()
            model[1].calls, model[1].running_mean = 3, torch.full((2,), 9.0)
            drawn()
            raise KeyError("an error inside")
    except KeyError:
        pass
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), held, strict=True))
    assert model[1].running_mean is mean
    assert all(torch.equal(now, then) for now, then in zip(model.buffers(), before, strict=True))
    assert not hasattr(model[1], "calls")
    assert drawn() == expected


def test_attributes_are_put_back_and_tensors_left_alone():
    module = nn.BatchNorm1d(2)
    before = {**vars(module)}
    module.calls, module.eps = 3, 1.0
    module.register_buffer("more", torch.zeros(1))
    put_back_attributes([(module, before)])
    assert not hasattr(module, "calls")
    assert module.eps == 1e-5
    assert "more" in dict(module.named_buffers())


def test_every_module_is_back_in_its_previous_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()  # a frozen BatchNorm
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]
