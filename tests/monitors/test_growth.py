"""Alarms on explosion and vanishing: on given numbers, on models built to show them, and none on healthy models."""

import math

import pytest
import torch
from torch import nn

from stabletrain.monitors import growth
from stabletrain.monitors.monitors import Monitors
from stabletrain.stability import precision
from stabletrain.stability.init import GPT2Init
from stabletrain.stability.objective import CrossEntropy
from tests.monitors.watched import (
    CPU,
    PRECISIONS,
    adamw,
    backward,
    features,
    images,
    look_at,
    tiny_gpt,
    tiny_resnet,
    tokens,
)

FP32 = PRECISIONS["fp32"]()
EVEN = {"a": 1.0, "b": 1.0, "c": 1.0}


class Chain(nn.Module):
    """Ten layers, each with an activation function, and a head; no norms, no residual connections."""

    def __init__(self, activation, std):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), activation()) for _ in range(10))
        self.head = nn.Linear(8, 4)
        for block in self.blocks:
            nn.init.normal_(block[0].weight, std=std)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def alarms_of(model, batch, *, steps=1, mode=FP32, optimizer=None, monitors=None):
    optimizer, monitors = optimizer or adamw(model), monitors or Monitors(1)
    return [alarm for _ in range(steps) for alarm in look_at(monitors, model, optimizer, batch, mode)[1]]


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_the_bounds_and_the_names(ratio):
    high, low = growth.EXPLODES * ratio, growth.VANISHES / ratio
    rising, falling = {"a": 1.0, "b": 0.1, "c": 0.1 * high}, {"a": 1.0, "b": 10.0, "c": 10 * low}
    for sizes, kind, names in ((rising, growth.explosion, "b to c"), (falling, growth.vanishing, "b to c")):
        assert bool(text := kind(sizes, EVEN)) is (ratio > 1)
        assert text is None or names in text
    back_up, back_down = {"a": high, "b": 1.0, "c": 3.0}, {"a": 2 * low, "b": 2.0, "c": 1.0}
    for sizes, kind, names in ((back_up, growth.explosion, "b to a"), (back_down, growth.vanishing, "b to a")):
        assert bool(text := kind(EVEN, sizes)) is (ratio > 1)
        assert text is None or (names in text and "gradients" in text)


@pytest.mark.parametrize("nothing", [0.0, math.nan, math.inf])
def test_zeros_and_non_finite_values_enter_no_ratio(nothing):
    sizes = {"a": 1.0, "b": nothing, "c": 2.0}
    assert growth.explosion(sizes, sizes) is growth.vanishing(sizes, sizes) is None
    assert growth.extremes({"a": nothing, "b": 1.0}) is None


def test_large_weights_explode_and_the_layers_are_named():
    alarms = alarms_of(Chain(nn.Identity, 2.0), features(), steps=3)
    assert [alarm.kind for alarm in alarms] == ["explosion"], "once"
    assert "from blocks.0 to blocks.9" in alarms[0].text


def test_one_bad_block_of_a_residual_model_is_named():
    model = tiny_gpt(n_layer=3)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight.mul_(1e5)
    alarms = alarms_of(model, tokens())
    assert [alarm.kind for alarm in alarms] == ["explosion"]
    assert "to blocks.1" in alarms[0].text


def test_gradients_through_sigmoids_vanish():
    alarms = alarms_of(Chain(nn.Sigmoid, 0.5), features(), steps=3)
    assert [alarm.kind for alarm in alarms] == ["vanishing"]
    assert "gradients" in alarms[0].text
    assert "backward pass from blocks.9 to blocks.1" in alarms[0].text


def test_activations_of_tiny_weights_vanish():
    alarms = alarms_of(Chain(nn.Tanh, 0.02), features())
    assert [alarm.kind for alarm in alarms] == ["vanishing"]
    assert "activations" in alarms[0].text


def test_gradients_below_adams_eps_raise_an_alarm_if_it_lasts():
    model, monitors = tiny_gpt(), Monitors(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=10.0)
    found = [alarms_of(model, tokens(), optimizer=optimizer, monitors=monitors) for _ in range(4)]
    assert [[alarm.kind for alarm in alarms] for alarms in found] == [[], [], ["vanishing"], []]
    assert "blocks.0, blocks.1" in found[2][0].text
    assert "optimizer.eps" in found[2][0].text


def test_fp16_underflow_raises_an_alarm_if_it_lasts_and_only_in_fp16():
    def underflown(mode):
        model = tiny_gpt(dropout=0.0)
        optimizer, monitors = adamw(model, lr=0.0), Monitors(1)
        found = []
        for _ in range(3):
            found += look_at(monitors, model, optimizer, tokens(), mode)[1]
        return [alarm.text for alarm in found if alarm.kind == "vanishing"]

    # gradients as small as those of a larger model without loss scaling
    (text,) = underflown(precision.fp16(CPU, init_scale=1e-6, growth_interval=2000, min_scale=1e-6))
    assert "exactly 0" in text
    assert underflown(FP32) == []


def test_zero_gradients_raise_an_alarm_only_in_fp16_and_fp8():
    shares = {"a": 0.95, "b": 0.5}
    assert growth.starving({}, shares, fp16=False) is None
    assert "fp8 may have flushed them" in growth.starving({}, shares, fp16=False, fp8=True)
    assert "of a are exactly 0" in growth.starving({}, shares, fp16=True)
    assert growth.starving({}, {"a": 0.5}, fp16=True) is None


def test_a_skipped_step_does_not_reset_the_count_and_its_gradients_are_not_judged():
    model, monitors = tiny_gpt(), Monitors(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=10.0)
    found = []
    for applied in (True, True, False, True):
        backward(model, tokens(), FP32)
        if not applied:
            for parameter in model.blocks[0].parameters():
                parameter.grad.mul_(1e6)
        monitors.before(model, optimizer, tokens(), FP32, CrossEntropy())
        if applied:
            optimizer.step()
        found.append([alarm.kind for alarm in monitors.after(model, optimizer, applied)[1]])
    assert found == [[], [], [], ["vanishing"]]


def test_attention_logits_above_the_limit_raise_an_alarm():
    model = tiny_gpt()
    with torch.no_grad():
        model.blocks[1].attention.query.weight.mul_(1e3)
        model.blocks[1].attention.key.weight.mul_(1e3)
    (alarm,) = alarms_of(model, tokens(), steps=2)
    assert alarm.kind == "attention"
    assert "blocks.1 reach" in alarm.text


def zeroed(model):
    """Every residual branch ends in zeros."""
    with torch.no_grad():
        for projection in model.residual_projections():
            projection.weight.zero_()
    return model


def gpt2_like(model):
    GPT2Init(0.02)(model)
    return model


def quiet_resnet():
    model = tiny_resnet()
    for name, parameter in model.named_parameters():
        if name.endswith("bn2.weight"):
            nn.init.zeros_(parameter)
    return model


HEALTHY = {
    "gpt": (lambda: gpt2_like(tiny_gpt(n_layer=4)), tokens),
    "gpt, zero branches": (lambda: zeroed(tiny_gpt(n_layer=4)), tokens),
    "resnet": (tiny_resnet, images),
    "resnet, zero branches": (quiet_resnet, images),
}


@pytest.mark.slow(unless=lambda name, mode: (name, mode) == ("gpt", "bf16"))
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_raise_nothing_in_their_first_steps(name, mode):
    make, data = HEALTHY[name]
    model = make()
    optimizer, monitors = adamw(model, lr=3e-3), Monitors(1)
    for step in range(50):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
        assert look_at(monitors, model, optimizer, data(step), PRECISIONS[mode]())[1] == []
