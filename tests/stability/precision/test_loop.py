"""The precision of a user's loop: the loss scale of a `GradScaler`, used by the guard or by the loop itself."""

import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from stabletrain.errors import ConfigError
from stabletrain.records import GradNorms, LossTerms
from stabletrain.stability.precision.loop import FLOOR, PRECISIONS, GradScaled, LoopScaled, precision_of_loop
from tests.stability.precision.given import CPU

SCALE = 64.0


def weight_and_optimizer():
    weight = nn.Parameter(torch.ones(2))
    return weight, torch.optim.SGD([weight], lr=0.5)


@pytest.fixture
def scaled():
    """A guarded loop's weight, optimizer, scaler and precision."""
    weight, optimizer = weight_and_optimizer()
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    return weight, optimizer, scaler, GradScaled(CPU, optimizer, scaler)


def backward(weight, precision, factor=1.0):
    weight.grad = None
    precision.scale((weight * factor).sum()).backward()
    precision.unscale_([weight.grad])


def total(loss, norm):
    return LossTerms(torch.tensor(loss)), GradNorms(torch.tensor(norm), torch.tensor([norm]))


@pytest.mark.parametrize("name", [None, *PRECISIONS])
def test_each_precision_has_its_name_and_its_autocast(name):
    precision = precision_of_loop(name, CPU)
    assert precision.name == (name or "")
    with precision.autocast():
        assert torch.is_autocast_enabled("cpu") == (name in ("bf16", "fp16"))


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="is not one of fp32, bf16, fp16, or None"):
        precision_of_loop("fp8", CPU)


def test_own_loss_scale_follows_verdicts_known_on_the_host():
    precision = precision_of_loop("fp16", CPU)
    precision.update(overflow=False, applied=True)
    precision.update(overflow=False, applied=False)
    assert precision.state_dict() == {"scale": 65536, "clean": 1}
    precision.update(overflow=True, applied=False)
    assert precision.state_dict() == {"scale": 32768, "clean": 0}


def test_gradients_are_unscaled_once_and_the_scale_grows_after_applied_steps(scaled):
    weight, optimizer, _, precision = scaled
    for scale in (SCALE, SCALE, 2 * SCALE):
        assert precision.loss_scale() == scale
        backward(weight, precision)
        assert weight.grad.tolist() == [1, 1]
        precision.step(optimizer)
        precision.update(overflow=False, applied=True)
    assert weight.tolist() == [-0.5, -0.5]
    assert precision.state_dict() == {}, "the scaler is the user's to save"


@pytest.mark.parametrize("several", [False, True])
def test_only_an_overflow_lowers_the_scale(scaled, several):
    weight, optimizer, scaler, _ = scaled
    precision = GradScaled(CPU, optimizer, scaler, several_ranks=several)
    backward(weight, precision, math.nan)
    precision.update(overflow=False, applied=False)
    assert precision.loss_scale() == SCALE
    backward(weight, precision, math.inf)
    precision.update(overflow=True, applied=False)
    assert precision.loss_scale() == SCALE / 2


def test_another_ranks_overflow_lowers_the_scale_of_every_rank(scaled):
    weight, optimizer, scaler, _ = scaled
    precision = GradScaled(CPU, optimizer, scaler, several_ranks=True)
    backward(weight, precision)
    precision.update(overflow=True, applied=False)
    assert precision.loss_scale() == SCALE / 2


def test_an_update_that_was_undone_is_applied_again_with_the_same_gradients(scaled):
    weight, optimizer, scaler, precision = scaled
    backward(weight, precision)
    before = scaler.state_dict()
    precision.step(optimizer)
    precision.update(overflow=False, applied=False)
    assert scaler.state_dict() == before
    precision.unscaled_again()
    precision.step(optimizer)
    precision.update(overflow=False, applied=True)
    assert weight.grad.tolist() == [1, 1]
    assert weight.tolist() == [0, 0]
    backward(weight, precision)  # the next step begins as usual


@pytest.mark.parametrize(("loss", "norm", "routine"), [(1.0, 1.0, 0), (1.0, math.inf, 1), (math.nan, math.nan, 0)])
def test_gradients_that_overflow_alone_close_the_gate_and_are_routine(scaled, loss, norm, routine):
    _, _, scaler, precision = scaled
    gate = torch.tensor(True)
    overflow = precision.overflow(*total(loss, norm))
    assert overflow == routine
    assert precision.close(gate, overflow) == (not routine)
    scaler.update(FLOOR)
    assert not precision.overflow(*total(loss, norm)), "no scale is left to lower"


@pytest.mark.parametrize("kind", [GradScaled, LoopScaled])
def test_a_scaler_that_is_switched_off_has_no_scale(kind):
    weight, optimizer = weight_and_optimizer()
    precision = kind(CPU, optimizer, GradScaler("cpu", enabled=False))
    backward(weight, precision)
    precision.step(optimizer)
    precision.update(overflow=False, applied=True)
    assert (precision.name, precision.loss_scale()) == ("", 1.0)
    assert precision.overflow(*total(1.0, math.inf)) is False
    assert precision.close(torch.tensor(True), False)
    assert weight.tolist() == [0.5, 0.5]


def test_gradients_that_a_fused_optimizer_would_unscale_are_unscaled_before(scaled):
    weight, optimizer, _, _ = scaled
    precision = LoopScaled(CPU, optimizer, None)
    weight.grad = torch.full((2,), 8.0)
    optimizer.grad_scale = torch.tensor(4.0)
    assert precision.loss_scale() == 4
    precision.unscale_([weight.grad])
    assert weight.grad.tolist() == [2, 2]
    assert optimizer.grad_scale is None
    assert precision.loss_scale() == 1
