"""fp16's loss scale: unscaling is exact, and the scale follows overflows and clean steps."""

import torch

from stabletrain.records import GradNorms, LossTerms
from stabletrain.stability.precision.loss_scale import LossScaled
from tests.stability.precision.given import CPU


def terms(loss):
    value = torch.tensor(loss)
    return LossTerms(value)


def norms(norm):
    return GradNorms(torch.tensor(norm), torch.tensor([norm]))


def scaled(**values):
    return LossScaled("fp16", CPU, torch.float16, **values)


def step(scaler, loss, norm):
    overflow = scaler.overflow(terms(loss), norms(norm))
    applied = torch.isfinite(torch.tensor(loss)) & torch.isfinite(torch.tensor(norm)) & ~overflow
    scaler.update(overflow, applied)
    return bool(overflow)


def test_unscaling_restores_the_gradient_exactly():
    scaler = scaled()
    weight = torch.randn(5, requires_grad=True)
    scaler.scale((weight * torch.arange(5.0)).sum()).backward()
    assert weight.grad[1] == 65536
    scaler.unscale_([weight.grad])
    assert torch.equal(weight.grad, torch.arange(5.0))


def test_the_scale_halves_on_overflow_and_doubles_after_clean_steps_in_a_row():
    scaler = scaled(init_scale=1024.0, growth_interval=3)
    assert step(scaler, 1.0, float("inf"))
    assert scaler.loss_scale() == 512
    assert [step(scaler, 1.0, 1.0) for _ in range(2)] == [False, False]
    assert step(scaler, 1.0, float("nan"))
    assert scaler.loss_scale() == 256
    scales = []
    for _ in range(6):
        step(scaler, 1.0, 1.0)
        scales.append(float(scaler.loss_scale()))
    assert scales == [256, 256, 512, 512, 512, 1024], "an overflow and a doubling both reset the count"


def test_a_non_finite_loss_is_not_an_overflow_and_does_not_change_the_state():
    scaler = scaled(init_scale=1024.0, growth_interval=2)
    step(scaler, 1.0, 1.0)
    before = {key: value.clone() for key, value in scaler.state_dict().items()}
    assert not step(scaler, float("nan"), float("nan"))
    assert all(torch.equal(before[key], value) for key, value in scaler.state_dict().items())


def test_an_overflow_at_the_floor_is_a_fault():
    scaler = scaled(init_scale=2.0, min_scale=1.0)
    assert step(scaler, 1.0, float("inf"))
    assert not step(scaler, 1.0, float("inf")), "at the floor the scale cannot be lowered"
    assert scaler.loss_scale() == 1


def test_the_scale_stops_growing_before_it_becomes_infinite():
    acting = scaled(init_scale=2.0**100, growth_interval=1)
    no, yes = torch.tensor(False), torch.tensor(True)
    for _ in range(100):
        acting.update(overflow=no, applied=yes)
    assert acting.loss_scale() == 2.0**100
    acting.update(overflow=yes, applied=no)
    assert acting.loss_scale() == 2.0**99


def test_the_state_survives_a_checkpoint():
    scaler = scaled(init_scale=1024.0, growth_interval=5)
    step(scaler, 1.0, float("inf"))
    step(scaler, 1.0, 1.0)
    other = scaled()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    other.load_state_dict({})  # of a run in another precision
    assert other.state_dict() == scaled().state_dict()
