"""QK-norm: the closed form in float64, the output dtype, and scores bounded by sqrt(d)."""

import math

import pytest
import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.stability.qknorm import LayerNormQK, NoQKNorm, RMSNormQK

DIM = 16


def reference(kind: type, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula, in float64."""
    x, weight = x.double(), weight.double()
    if kind is LayerNormQK:
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def sample(scale: float = 1.0) -> Tensor:
    """`[batch, head, time, dim]` with a mean, so that subtracting it shows."""
    return scale * (torch.randn(2, 3, 5, DIM, generator=torch.Generator().manual_seed(0)) + 0.7)


@pytest.mark.parametrize("kind", [LayerNormQK, RMSNormQK])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_closed_form_comes_back_in_the_inputs_dtype(kind: type, dtype: torch.dtype, autocast: bool) -> None:
    norm = kind(eps=1e-6)(DIM)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    if dtype == torch.float64:
        norm.double()
    x = sample().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = norm(x)
    assert y.dtype == dtype
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), reference(kind, x, norm.weight, 1e-6), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [LayerNormQK, RMSNormQK])
def test_squares_beyond_fp16s_range_are_handled(kind: type) -> None:
    """1000^2 > 65504: the mean of squares must not be taken in fp16."""
    norm = kind(eps=1e-6)(DIM)
    x = sample(scale=1000.0).half()
    torch.testing.assert_close(norm(x).double(), reference(kind, x, norm.weight, 1e-6), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", [LayerNormQK, RMSNormQK])
def test_the_scale_of_the_input_does_not_matter(kind: type) -> None:
    norm = kind(eps=1e-6)(DIM)
    torch.testing.assert_close(norm(sample(1e4)), norm(sample()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [LayerNormQK, RMSNormQK])
def test_scores_are_bounded_by_sqrt_d_and_the_bound_is_reached(kind: type) -> None:
    norm = kind(eps=1e-6)(DIM)
    q = norm(sample(1e5)).double()
    scores = q @ q.mT / math.sqrt(DIM)
    assert scores.max().item() == pytest.approx(math.sqrt(DIM), rel=1e-6)


@pytest.mark.parametrize("kind", [LayerNormQK, RMSNormQK])
def test_a_constant_or_zero_head_stays_finite(kind: type) -> None:
    norm = kind(eps=1e-6)(DIM)
    for value in (0.0, 3.0):
        x = torch.full((1, 1, 2, DIM), value, requires_grad=True)
        norm(x).sum().backward()
        assert norm(x).isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", [LayerNormQK, RMSNormQK])
def test_there_is_a_gain_and_no_bias_and_each_call_makes_its_own(kind: type) -> None:
    option = kind(eps=1e-6)
    first, second = option(DIM), option(DIM)
    assert [(name, p.shape) for name, p in first.named_parameters()] == [("weight", (DIM,))]
    assert torch.equal(first.weight, torch.ones(DIM))
    assert first.weight is not second.weight


@pytest.mark.parametrize("kind", [LayerNormQK, RMSNormQK])
def test_eps_is_the_one_given(kind: type) -> None:
    x = sample(1e-2)
    norm = kind(eps=1.0)(DIM)
    torch.testing.assert_close(norm(x).double(), reference(kind, x, norm.weight, 1.0), rtol=1e-5, atol=1e-7)


def test_none_is_the_identity_without_parameters() -> None:
    norm = NoQKNorm()(DIM)
    x = sample()
    assert norm(x) is x
    assert not list(norm.parameters())


@pytest.mark.parametrize("kind", [LayerNormQK, RMSNormQK])
def test_an_eps_that_hides_the_size_of_the_heads_is_refused(kind):
    kind(1.0)
    with pytest.raises(ConfigError, match="^qknorm.eps=1000000 is above 1"):
        kind(1000000)
