"""A contributing cause needs evidence of its own; another explanation of the same evidence does not contribute."""

import math
from dataclasses import replace

import pytest

from stabletrain.forensics.diagnosis.causes import RULES
from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.facts import Culprits, Damage, LargestInput
from tests.forensics.diagnosis.given import BAD, CALM, FINE, NAN, READING, SETTING, SPIKE, origin

OUTLIER = LargestInput({"index": 3, "source": "digits.csv:41"}, 1e3, 1.0)
FAILED = replace(
    SPIKE,
    kind="nonfinite",
    reading=READING._replace(loss=math.nan, grad_norm=math.nan),
    origin=origin("aten.exp", "exp_overflow"),
    outcomes={"same": NAN, "fp32": NAN, "fresh_batch": NAN, "older_state": NAN},
)
"""An exp overflows, with every batch and with older weights."""

GROWTH = {"monitors/attn_logit_max": 2e5}, {"monitors/attn_logit_max": 2.0}


def after(variant, evidence=FAILED, **more):
    """The evidence if the replay `variant` is normal."""
    return replace(evidence, outcomes={**evidence.outcomes, variant: FINE}, **more)


def causes(evidence):
    found = diagnose(evidence)
    return [found.cause, *(other.cause for other in found.also)]


def test_an_outlier_that_overflows_an_unsafe_operation_has_both_causes_each_with_its_fix():
    found = diagnose(after("fresh_batch", largest_input=OUTLIER))
    assert (found.cause, found.fix[0]) == ("bad_batch", "clean digits.csv:41")
    (other,) = found.also
    assert (other.cause, other.fix) == ("unsafe_op", ["model.py:7: subtract the largest value first, as softmax and "
                                                      "logsumexp do"])  # fmt: skip
    assert other.also == ()


def test_a_cause_is_listed_once_if_two_of_its_rules_hold():
    assert causes(after("fresh_batch", largest_input=OUTLIER, origin=None, culprits=Culprits([3], True, 6))) == [
        "bad_batch"
    ]


def test_an_outlier_that_overflows_fp16_has_both_causes_and_an_ordinary_overflow_has_not():
    choices = {**SETTING.choices, "precision": "fp16"}
    narrow = after("fp32", after("fresh_batch", largest_input=OUTLIER, setting=replace(SETTING, choices=choices)))
    assert causes(replace(narrow, origin=origin(dtype="float16", in_fp32=7e4))) == ["bad_batch", "fp16_overflow"]
    assert causes(after("fresh_batch", largest_input=OUTLIER, origin=origin())) == ["bad_batch"]


def test_an_operation_is_explained_once():
    assert causes(FAILED) == ["unsafe_op"]
    assert causes(replace(FAILED, origin=origin(why="zero_variance"))) == ["zero_variance_norm"]
    fp16 = origin("aten.exp", "exp_overflow", dtype="float16", in_fp32=7e4)
    assert causes(after("fp32", origin=fp16)) == ["fp16_overflow"]
    assert causes(replace(FAILED, origin=origin("aten.nll_loss_forward", "mean_of_nothing"))) == ["bad_label"]
    floor = replace(
        SETTING, choices={**SETTING.choices, "precision": "fp16"}, values={"precision.min_scale": READING.loss_scale}
    )
    backward = origin("aten.mm", dtype="float16", in_fp32=7e4, direction="backward")
    collapsed = after("fp32", origin=backward, reading=READING._replace(grad_norm=math.inf), setting=floor)
    assert causes(collapsed) == ["loss_scale_collapse"]


@pytest.mark.parametrize(
    ("culprits", "fresh", "expected"),
    [
        (Culprits([7], True, 6), FINE, ["unsafe_op", "bad_batch"]),
        (Culprits([7], True, 6), NAN, ["unsafe_op"]),
        (Culprits([7], True, 6, others_too=True), FINE, ["unsafe_op"]),
        (Culprits([], False, 1), FINE, ["unsafe_op"]),
        (None, FINE, ["unsafe_op"]),
    ],
)
def test_the_batch_contributes_if_another_is_normal_and_its_samples_are_known(culprits, fresh, expected):
    outcomes = {**FAILED.outcomes, "fresh_batch": fresh}
    assert causes(replace(FAILED, culprits=culprits, outcomes=outcomes)) == expected


def test_weights_contribute_only_if_the_same_batch_is_normal_with_older_ones():
    sizes, before = GROWTH
    grown = replace(FAILED, sizes=sizes, before=before)
    assert causes(grown) == ["unsafe_op"]
    assert causes(after("older_state", grown)) == ["unsafe_op", "attention_logit_growth"]
    rushed = replace(FAILED, drift=replace(CALM, share=0.5, grown=1.2))
    assert causes(rushed) == ["unsafe_op"]
    assert causes(after("older_state", rushed)) == ["unsafe_op", "lr_too_high"]
    assert causes(after("older_state", update_length=5.0)) == ["unsafe_op", "optimizer_staleness"]
    assert causes(after("older_state")) == ["unsafe_op"], "that it was normal before is no cause"


def test_several_measurements_of_the_weights_all_contribute():
    sizes, before = GROWTH
    both = replace(SPIKE, sizes={**sizes, "monitors/log_z_mean": 140.0}, before={**before, "monitors/log_z_mean": 5.0})
    assert causes(both) == ["attention_logit_growth", "output_logit_drift"]


def test_if_all_weights_have_moved_too_far_it_is_no_news_that_the_logits_have_grown():
    sizes, before = GROWTH
    torn = replace(SPIKE, drift=replace(CALM, share=0.5, grown=1.2), sizes=sizes, before=before)
    assert causes(torn) == ["lr_too_high"]
    unsafe = after("older_state", replace(FAILED, drift=torn.drift, sizes=sizes, before=before))
    assert causes(unsafe) == ["unsafe_op", "lr_too_high"]


def test_a_bad_input_and_a_bad_label_are_both_listed():
    bad = [{"index": number, "fault": fault, "what": fault} for number, fault in enumerate(("label", "input"))]
    found = diagnose(replace(SPIKE, samples=bad))
    assert (found.cause, found.fix) == ("poison_input", ["clean sample 1 of the batch"])
    assert [(other.cause, other.fix) for other in found.also] == [("bad_label", ["correct sample 0 of the batch"])]
    assert causes(replace(SPIKE, samples=bad[1:])) == ["poison_input"]
    assert causes(replace(SPIKE, samples=bad[:1])) == ["bad_label"]


def test_a_corrupt_state_and_a_hardware_fault_explain_what_was_measured_after_them():
    sizes, before = GROWTH
    everything = replace(
        after("older_state", after("fresh_batch")), culprits=Culprits([7], True, 6), sizes=sizes, before=before
    )
    assert causes(everything) == ["unsafe_op", "attention_logit_growth", "bad_batch"]
    damage = [Damage("parameter", "w", "1 of 9 values are not finite", few=True)]
    assert causes(replace(everything, damage=damage)) == ["corrupt_state"]
    once = {**everything.outcomes, "same": replace(FINE, bitwise_equal_to_reading=False)}
    assert causes(replace(everything, outcomes=once, repeats=True)) == ["hardware_fault"]


def test_nothing_contributes_to_a_step_that_is_normal_when_replayed():
    sizes, before = GROWTH
    finite = replace(SPIKE, outcomes=dict.fromkeys(SPIKE.outcomes, FINE), sizes=sizes, before=before, update_length=5.0)
    assert len(causes(finite)) == 1


def test_causes_that_hold_for_want_of_others_do_not_contribute():
    """A spike is far above the second moment, and another batch fails too, whatever the cause."""
    sizes, before = GROWTH
    grown = replace(SPIKE, sizes=sizes, before=before, staleness=50.0)
    assert {rule(grown).cause for rule in RULES if rule(grown)} == {
        "attention_logit_growth", "optimizer_staleness", "lr_too_high"
    }  # fmt: skip
    assert causes(grown) == ["attention_logit_growth"]
    assert causes(replace(SPIKE, outcomes={**SPIKE.outcomes, "older_state": BAD}, sizes=sizes, before=before)) == [
        "attention_logit_growth"
    ]


@pytest.mark.parametrize(
    ("rate", "usual", "step", "fix"),
    [
        (3.0, 3e-3, 50, "optimizer.lr=0.003"),
        (0.03, 3e-3, 50, "optimizer.lr=0.003"),
        (0.029, 3e-3, 50, "qknorm=layernorm"),
        (3.0, 3e-3, 1, "qknorm=layernorm"),
        (3.0, None, 50, "qknorm=layernorm"),
        (1e-3, 3e-3, 50, "qknorm=layernorm"),
    ],
)
def test_at_a_rate_far_above_the_usual_one_that_rate_is_the_first_fix(rate, usual, step, fix):
    sizes, before = GROWTH
    setting = replace(SETTING, values={"optimizer.lr": rate}, usual_lr=usual)
    grown = replace(SPIKE, sizes=sizes, before=before, setting=setting, reading=READING._replace(step=step))
    found = diagnose(grown)
    assert (found.cause, found.fix[0]) == ("attention_logit_growth", fix)
    assert "qknorm=layernorm" in found.fix
    assert sum(each.startswith("optimizer.lr=") for each in found.fix) == 1


@pytest.mark.parametrize(
    ("rate", "fix"), [(6e-3, "optimizer.lr=0.003"), (5.9e-3, "optimizer.lr=0.002"), (3e-3, "optimizer.lr=0.001")]
)
def test_a_rate_that_is_said_to_be_too_high_is_lowered_to_the_usual_one(rate, fix):
    setting = replace(SETTING, values={"optimizer.lr": rate}, usual_lr=3e-3)
    found = diagnose(replace(SPIKE, setting=setting))
    assert (found.cause, found.fix) == ("lr_too_high", [fix])


def test_what_updates_do_not_bring_about_keeps_its_fix_at_any_rate():
    setting = replace(SETTING, values={"optimizer.lr": 3.0}, usual_lr=3e-3)
    assert diagnose(replace(FAILED, setting=setting)).fix == diagnose(FAILED).fix
