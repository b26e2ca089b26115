"""The limit of a SwiGLU: its formula, its gradient, and what it is refused with."""

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.models.layers import SwiGLUMLP
from tests.models.given import small


def mlp(limit):
    torch.manual_seed(0)
    return SwiGLUMLP(8, False, limit).double()


def test_the_gate_is_bounded_above_and_the_other_factor_on_both_sides():
    bounded, x = mlp(0.5), 10 * torch.randn(4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gate, up = x @ bounded.gate.weight.T, x @ bounded.up.weight.T
    assert min(gate.min(), up.min()) < -1 and max(gate.max(), up.max()) > 1, "the case to test"  # noqa: PT018
    gate, up = torch.where(gate > 0.5, 0.5, gate), torch.where(up.abs() > 0.5, 0.5 * up.sign(), up)
    expected = (gate / (1 + (-gate).exp()) * up) @ bounded.down.weight.T
    torch.testing.assert_close(bounded(x), expected, rtol=1e-12, atol=1e-12)


def test_a_value_beyond_the_limit_has_no_gradient_and_a_limit_out_of_reach_changes_no_bit():
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tight, wide, none = mlp(1e-9), mlp(1e9), mlp(None)
    assert torch.equal(wide(x), none(x))
    tight(x).sum().backward()
    up = x @ tight.up.weight.T
    assert (up.abs() > 1e-9).all()
    assert not tight.up.weight.grad.any()
    assert {*tight.state_dict()} == {*none.state_dict()}


def test_it_needs_a_swiglu_and_a_number_above_0():
    for kind in ("gelu", "gelu_tanh"):
        with pytest.raises(ConfigError, match=f"swiglu_limit=7 does nothing with model.mlp={kind}; fix: model.mlp=sw"):
            small(mlp=kind, swiglu_limit=7)
    for wrong in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=f"swiglu_limit={wrong} is not a finite number above 0"):
            small(mlp="swiglu", swiglu_limit=wrong)
    assert small(mlp="swiglu", swiglu_limit=7).blocks[1].mlp.limit == 7
