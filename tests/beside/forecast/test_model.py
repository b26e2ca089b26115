"""The model that comes with the package, whatever it is fitted on."""

import numpy as np
import pytest

from stabletrain.beside.forecast.model import FEATURES, features, fitted
from stabletrain.beside.forecast.signals import BY_NAME


def test_weights_are_not_negative_and_every_signal_has_a_healthy_value():
    model = fitted()
    assert len(model.weights) == len(FEATURES)
    assert min(model.weights) >= 0
    assert max(model.weights) > 0
    assert model.healthy.keys() == BY_NAME.keys()
    assert 0 < model.alarm < 1
    assert 0 < model.earliest <= model.latest


@pytest.mark.parametrize("number", range(len(FEATURES)), ids=FEATURES)
def test_the_probability_falls_with_no_feature(number):
    generator, model = np.random.default_rng(number), fitted()
    for values in generator.uniform(0, 1.5, size=(50, len(FEATURES))):
        higher = values.copy()
        higher[number] += generator.uniform(0, 1.5)
        assert 0 <= model.probability(values) <= model.probability(higher) <= 1


def test_the_features_are_the_highest_levels_and_the_loss_is_apart():
    levels = {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.2, "loss": 1.5}
    ahead = {"a": 0.1, "b": 1.0, "c": 1.2, "loss": 1.5}
    assert features(levels, ahead).tolist() == [0.9, 0.5, 0.2, 1.2, 1.0, 1.5]
    assert features({}, {}).tolist() == [0.0] * 6
