"""Gradients that change while they are scaled: only what is wrong under any scale is a fault."""

import pytest
import torch

from stabletrain.beside.preflight.while_scaled import change_of, of_changes

SCALE = 1024.0


def changes(change):
    """How a change of the gradients of three steps looks."""
    torch.manual_seed(0)
    steps = [{"weight": torch.randn(4, 3) * SCALE * size, "bias": torch.randn(3) * SCALE} for size in (1, 2, 3)]
    found = [change_of(0, before, change(before), SCALE, "loop.py:7") for before in steps]
    return [each for each in found if each is not None]


def norm_of(gradients):
    return sum(float(each.square().sum()) for each in gradients.values()) ** 0.5


def times(factor):
    return lambda gradients: {name: each * factor(gradients) for name, each in gradients.items()}


@pytest.mark.parametrize(
    ("change", "verdict", "text"),
    [
        (times(lambda gradients: 0.5 / norm_of(gradients)), "fault", "clipped to a norm of 0.5 while they are still"),
        (
            lambda gradients: {name: each.clamp(-9, 9) for name, each in gradients.items()},
            "fault",
            "clipped to 9 while",
        ),
        (times(lambda gradients: 1 / SCALE), "fault", "divided by the loss scale 1024 by hand, and unscaled once more"),
        (times(lambda gradients: 1 / 3), "note", "right only if the change is a multiplication"),
        (lambda gradients: {name: each + 1 for name, each in gradients.items()}, "note", "are changed while they"),
    ],
)
def test_a_change_is_a_fault_if_no_scale_makes_it_right(change, verdict, text):
    [found] = of_changes(changes(change))
    assert (found.check, found.verdict, found.line) == ("order", verdict, "loop.py:7")
    assert found.places == ("scaler", "optimizers.0")
    assert text in found.text


def test_gradients_that_are_equal_or_not_finite_are_no_change():
    assert not changes(lambda gradients: gradients)
    assert not changes(times(lambda gradients: torch.inf))
