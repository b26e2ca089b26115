"""A loop computed plainly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stabletrain.beside.preflight.plain import InDouble, eager, in_double, without_autocast, without_dropout
from tests.beside.preflight.small import maker


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_is_recomputed_and_what_was_is_told(reentrant):
    calls, x = [], torch.ones(3, requires_grad=True)

    def squared(x):
        calls.append(x)
        return x * x

    with eager() as found:
        checkpoint(squared, x, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()
    assert len(calls) == 1
    assert [(each.function, each.preserves) for each in found] == [(squared, False)]
    checkpoint(squared, x, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 3


def test_autocast_stays_off_and_a_kept_context_is_as_before():
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    with without_autocast(), context:
        assert not torch.is_autocast_enabled("cpu")
    with context:
        assert torch.is_autocast_enabled("cpu")


def test_no_kind_of_dropout_drops():
    x = torch.randn(2, 5, 8)
    model = nn.ModuleList(
        [nn.GRU(8, 8, 2, dropout=0.9), nn.TransformerEncoderLayer(8, 2, 8, dropout=0.9), nn.Dropout()]
    )

    def outputs():
        return [model[0](x)[0], model[1](x), model[2](x), F.scaled_dot_product_attention(x, x, x, dropout_p=0.9)]

    with without_dropout(model):
        assert all(map(torch.equal, outputs(), outputs()))
    assert not any(map(torch.equal, outputs(), outputs()))


def test_in_double_mixed_and_cast_code_computes_in_fp64():
    loop, weight = maker()(), torch.ones(3, 3)
    with in_double(loop):
        x = torch.randn(2, 3)
        assert x.dtype == torch.float64
        for each in (F.linear(x, weight), x.float(), x.to(torch.bfloat16), x.softmax(1, dtype=torch.float32)):
            assert each.dtype == torch.float64
        assert {each.dtype for each in loop.model.parameters()} == {torch.float64}
    assert torch.get_default_dtype() == torch.float32
    with InDouble():
        assert F.linear(torch.ones(2, 3), weight).dtype == torch.float32  # nothing is in fp64
