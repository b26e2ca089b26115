"""Heights, levels and places of the signals."""

import math

import pytest

from stabletrain.beside.forecast.signals import HIGHEST, SIGNALS, values_of

EACH = pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)


def healthy_of(signal):
    """A value far from the threshold, on the healthy side."""
    away = -1.0 if not signal.falls else 1.0
    return signal.threshold * 100**away if signal.log else signal.threshold + 5 * away


@EACH
def test_the_level_is_0_at_the_healthy_value_and_1_at_the_threshold(signal):
    healthy = healthy_of(signal)
    assert signal.level(signal.height(healthy), healthy) == 0
    assert signal.level(signal.height(signal.threshold), healthy) == pytest.approx(1)
    between = signal.value((signal.height(healthy) + signal.height(signal.threshold)) / 2)
    assert signal.level(signal.height(between), healthy) == pytest.approx(0.5)


@EACH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_has_the_highest_level(signal, value):
    assert signal.level(signal.height(value), healthy_of(signal)) == HIGHEST == 1.5


@EACH
@pytest.mark.parametrize("value", [0.003, 1.0, 250.0])
def test_value_is_the_inverse_of_height(signal, value):
    assert signal.value(signal.height(value)) == pytest.approx(value)


@EACH
def test_the_height_grows_towards_trouble(signal):
    assert signal.height(healthy_of(signal)) < signal.height(signal.threshold)


def test_a_metric_of_each_place_and_one_of_the_whole_model():
    metrics = {"monitors/attn_logit_max/blocks.0": 1.0, "monitors/attn_logit_max/head": 2.0, "grad/norm": 3.0}
    assert values_of(metrics)["attention_logits"] == {"blocks.0": 1.0, "head": 2.0}
    assert values_of(metrics)["grad_norm"] == {"": 3.0}
    assert values_of(metrics)["log_z"] == {}
