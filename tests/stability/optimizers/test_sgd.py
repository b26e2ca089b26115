"""SGD against its formula in float64."""

import pytest
import torch
from torch import nn

from stabletrain.stability.optimizers import SGD


@pytest.mark.parametrize("fused", [True, False])
def test_sgd_equals_the_formula_in_float64(fused):
    model = nn.Linear(3, 2, bias=False)
    expected = model.weight.detach().double().clone()
    optimizer = SGD(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.01, fused=fused)(model)
    velocity = torch.zeros_like(expected)
    for step in range(1, 4):
        model.weight.grad = torch.full((2, 3), 0.3 * step)
        optimizer.step()
        velocity = 0.9 * velocity + (0.3 * step + 0.01 * expected)
        expected = expected - 0.1 * velocity
    torch.testing.assert_close(model.weight.double(), expected, rtol=1e-6, atol=1e-7)
