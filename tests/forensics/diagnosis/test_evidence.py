"""Checks each sign in the evidence of an incident at its bound."""

import math
from dataclasses import replace

import pytest

from stabletrain.forensics.diagnosis.evidence import (
    ADAM_SLACK_LRS,
    HUGE_INPUT,
    INPUT_OUTLIER_RATIO,
    LR_TOO_HIGH,
    MAX_UPDATE_LENGTH,
    WEIGHTS_RUINED,
    decay_too_strong,
    excess_length,
    finite_in_fp32,
    first_loss_too_large,
    has_input_outlier,
    is_spread,
    moved_beyond_lr,
    moved_too_far,
    no_finite_result,
    weights_ruined,
)
from stabletrain.forensics.facts import LargestInput, Outcome
from stabletrain.forensics.trace.values import Values
from tests.forensics.diagnosis.given import BAD, CALM, FINE, NAN, READING, SETTING, SPIKE, origin


def ran(outcome, **changed):
    """The spike with one replay, `same`."""
    return replace(SPIKE, outcomes={"same": outcome}, **changed)


@pytest.mark.parametrize(
    ("outcome", "normal"),
    [
        (Outcome(True, 6.0, 20.0), True),
        (Outcome(True, 6.001, 20.0), False),
        (Outcome(True, 6.0, 20.01), False),
        (Outcome(False, 1.0, 1.0), False),
        (Outcome(not_run="the time limit was reached"), None),
    ],
    ids=["at the limits", "loss", "norm", "not finite", "not run"],
)
def test_a_replay_is_normal_if_it_is_finite_and_within_the_guards_limits(outcome, normal):
    assert ran(outcome).normal("same") is normal
    assert ran(outcome).normal("fp32") is None, "it was not run"


def test_replays_are_not_judged_if_the_buffers_were_not_finite():
    """A replay does not measure buffers."""
    assert ran(FINE, reading=READING._replace(buffers=math.inf)).normal("same") is None
    assert ran(FINE, reading=READING._replace(buffers=math.inf)).finite("same") is True


def test_size_is_a_monitor_metric_and_grown_is_its_ratio_to_the_older_state():
    evidence = replace(
        SPIKE, sizes={"monitors/a": 6.0, "monitors/b": 1.0}, before={"monitors/a": 1.5, "monitors/b": 0.0}
    )
    assert (evidence.size("a"), evidence.grown("a")) == (6.0, 4.0)
    assert math.isnan(evidence.size("none"))
    assert math.isnan(evidence.grown("none"))
    assert math.isnan(evidence.grown("b")), "no ratio to 0"


@pytest.mark.parametrize(
    ("share", "update_length", "is_rushed"),
    [
        (LR_TOO_HIGH, 1.0, False),
        (1.01 * LR_TOO_HIGH, 1.0, True),
        (1.9 * LR_TOO_HIGH, 2.0, False),
        (2.1 * LR_TOO_HIGH, 2.0, True),
    ],
)
def test_weights_are_rushed_if_they_move_further_than_the_length_of_the_updates_explains(
    share, update_length, is_rushed
):
    """If updates are two learning rates long, moving twice as far does not mean that the learning rate is too high."""
    assert moved_too_far(replace(SPIKE, drift=replace(CALM, share=share), update_length=update_length)) is is_rushed
    assert not moved_too_far(replace(SPIKE, drift=None))


def test_updates_are_overlong_only_above_the_bound_for_equally_old_moments():
    assert excess_length(replace(SPIKE, update_length=MAX_UPDATE_LENGTH)) == 1.0
    assert excess_length(replace(SPIKE, update_length=MAX_UPDATE_LENGTH + 0.5)) == MAX_UPDATE_LENGTH + 0.5
    assert excess_length(replace(SPIKE, update_length=math.nan)) == 1.0


def test_adam_cannot_move_weights_further_than_the_learning_rate_allows():
    furthest = 3e-3 * (10 + ADAM_SLACK_LRS)
    assert not moved_beyond_lr(replace(SPIKE, drift=replace(CALM, moved=furthest)))
    far = replace(SPIKE, drift=replace(CALM, moved=1.01 * furthest))
    assert moved_beyond_lr(far)
    assert not moved_beyond_lr(replace(far, update_length=2.0))
    assert not moved_beyond_lr(replace(far, drift=replace(far.drift, adaptive=False))), "SGD takes steps of any length"
    assert not moved_beyond_lr(replace(far, setting=replace(SETTING, values={})))


def test_weights_are_wild_only_if_the_step_is_normal_on_the_older_state():
    torn = replace(SPIKE, drift=replace(CALM, share=1.01 * WEIGHTS_RUINED))
    assert weights_ruined(torn)
    assert not weights_ruined(replace(torn, outcomes={"older_state": BAD}))
    assert not weights_ruined(replace(torn, outcomes={}))
    assert not weights_ruined(replace(torn, drift=None))
    assert not weights_ruined(replace(SPIKE, drift=replace(CALM, share=WEIGHTS_RUINED)))


def test_a_first_loss_far_above_guessing_is_absurd_if_fp32_gives_it_too():
    first = replace(SPIKE, reading=READING._replace(step=3), outcomes={"fp32": Outcome(True, 31.0, 1.0)})
    assert first_loss_too_large(first)
    assert not first_loss_too_large(replace(first, reading=READING._replace(step=4)))
    assert not first_loss_too_large(replace(first, outcomes={"fp32": Outcome(True, 30.0, 1.0)}))
    assert not first_loss_too_large(replace(first, outcomes={}))


def test_an_input_is_too_bright_if_it_is_far_larger_than_those_of_a_batch_that_stays_finite():
    bright = LargestInput({"index": 0}, 2.1 * INPUT_OUTLIER_RATIO, 2.0)
    seen = replace(SPIKE, largest_input=bright, outcomes={"fresh_batch": FINE})
    assert has_input_outlier(seen)
    assert not has_input_outlier(replace(seen, largest_input=replace(bright, largest=2 * INPUT_OUTLIER_RATIO)))
    assert not has_input_outlier(replace(seen, largest_input=replace(bright, elsewhere=0.0)))
    assert not has_input_outlier(replace(seen, outcomes={"fresh_batch": NAN}))
    assert not has_input_outlier(replace(seen, largest_input=None))


@pytest.mark.parametrize(
    ("decay", "rate", "kind", "is_decayed"),
    [
        (501.0, 1e-3, "coupled", True),
        (499.0, 1e-3, "coupled", False),
        (0.9, 1.0, "coupled", False),
        (1.1, 1e-3, "independent", True),
        (None, 1e-3, "coupled", False),
    ],
)
def test_weight_decay_is_to_blame_if_it_removes_over_half_of_the_weights_per_step(decay, rate, kind, is_decayed):
    values = {"optimizer.weight_decay": decay, "optimizer.lr": rate, "optimizer.decay": kind}
    assert decay_too_strong(replace(SPIKE, setting=replace(SETTING, values=values))) is is_decayed


@pytest.mark.parametrize(
    ("ops", "spread"),
    [
        (["aten.div", "aten.var"], True),
        (["aten.sqrt", "aten.mean", "aten.pow"], True),
        (["aten.mean", "aten.sub"], False),
        (["aten.norm", "aten.sub"], True),
        (["aten.linalg_vector_norm", "aten.mul"], False),
        (["aten.div", "aten.mul_", "aten.norm"], True),
        (["aten.mul", "aten.norm"], False),
        ([], False),
    ],
)
def test_a_variance_is_distinguished_from_a_plain_vector_length(ops, spread):
    assert is_spread(ops) is spread


def test_fp16_is_too_narrow_if_the_step_is_finite_in_fp32():
    assert finite_in_fp32(replace(SPIKE, origin=origin(in_fp32=7e4), outcomes={"fp32": FINE}))
    assert not finite_in_fp32(replace(SPIKE, origin=origin(in_fp32=7e4), outcomes={"fp32": NAN}))
    assert not finite_in_fp32(replace(SPIKE, outcomes={"fp32": FINE}))


def test_an_operation_has_no_result_only_if_its_inputs_were_ordinary():
    def of(size, exact=math.inf):
        return replace(SPIKE, origin=replace(origin(in_fp32=exact), inputs=(Values((2,), "float32", size),)))

    assert no_finite_result(of(0.99 * HUGE_INPUT))
    assert no_finite_result(of(None)), "integers have no absmax, and do not count as huge"
    assert not no_finite_result(of(HUGE_INPUT))
    assert not no_finite_result(of(1.0, exact=7e4))
    assert not no_finite_result(SPIKE)
