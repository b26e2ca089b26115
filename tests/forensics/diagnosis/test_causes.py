"""Each rule decides by the evidence alone, and each fix is one that the run can use."""

import math
from dataclasses import replace

import pytest
import torch

from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.diagnosis.evidence import Evidence
from stabletrain.forensics.facts import Culprits, Damage, Drift, LargestInput, largest_value
from stabletrain.forensics.trace.values import Values
from tests.forensics.diagnosis.given import BAD, CALM, FINE, NAN, READING, SETTING, SPIKE, origin


def nonfinite(found, divisor_ops=(), fp32=NAN, **setting):
    chosen = replace(SETTING, choices={**SETTING.choices, **setting.pop("choices", {})}, **setting)
    outcomes = {"same": replace(NAN, bitwise_equal_to_reading=True), "fp32": fp32, "fresh_batch": NAN}
    return Evidence(
        "nonfinite",
        READING._replace(loss=math.nan, grad_norm=math.nan),
        origin=found,
        divisor_ops=divisor_ops,
        outcomes=outcomes,
        drift=CALM,
        setting=chosen,
    )


def grown(**drift):
    sizes = {"monitors/attn_logit_max": 2e5, "monitors/log_z_mean": 140.0}
    before = {"monitors/attn_logit_max": 2.0, "monitors/log_z_mean": 5.0}
    return replace(SPIKE, sizes=sizes, before=before, drift=replace(CALM, **drift))


def test_attention_that_grows_alone_is_distinguished_from_all_weights_growing():
    assert diagnose(grown()).cause == "attention_logit_growth"
    assert diagnose(grown(moved=30.0, share=10.0, grown=1e3)).cause == "lr_too_high"


def test_an_update_longer_than_the_learning_rate_allows_is_the_learning_rates_fault():
    """Over so many steps that the share per step is small."""
    assert diagnose(grown(steps=50, moved=1.0, share=0.2)).cause == "lr_too_high"
    assert diagnose(grown(steps=50, moved=0.1, share=0.2)).cause == "attention_logit_growth"


def test_a_model_without_attention_is_never_told_to_normalise_queries():
    evidence = replace(
        grown(), setting=replace(SETTING, has_attention=False, choices={"precision": "fp16", "zloss": "none"})
    )
    assert not any("qk" in fix for fix in diagnose(evidence).fix)
    fp16 = nonfinite(
        origin(dtype="float16", in_fp32=7e4), fp32=FINE, choices={"precision": "fp16"}, has_attention=False
    )
    assert not any(fix.startswith(("qknorm", "softcap")) for fix in diagnose(fp16).fix)


@pytest.mark.parametrize("why", ["overflow", "exp_overflow"])
def test_what_fp32_can_hold_is_fp16s_overflow(why):
    found = diagnose(nonfinite(origin(why=why, dtype="float16", in_fp32=7e4), fp32=FINE, choices={"precision": "fp16"}))
    assert (found.cause, found.fix[0]) == ("fp16_overflow", "precision=bf16")
    assert diagnose(nonfinite(origin(why="exp_overflow"))).cause == "unsafe_op"


def test_a_large_first_loss_is_the_inits_fault_only_if_every_batch_fails_in_fp16():
    found = nonfinite(origin(dtype="float16", in_fp32=7e4), fp32=replace(BAD, loss=90.0), choices={"precision": "fp16"})
    first = replace(found, reading=READING._replace(step=1, loss=math.nan))
    assert diagnose(first).cause == "bad_init"
    assert diagnose(replace(first, outcomes={**first.outcomes, "fresh_batch": FINE})).cause == "fp16_overflow"


def test_eps_is_not_proposed_for_the_variance_of_one_value():
    one, several = (diagnose(nonfinite(origin("aten.var", why))) for why in ("variance_of_one", "zero_variance"))
    assert one.cause == several.cause == "zero_variance_norm"
    assert ("eps" in one.fix[0], "eps" in several.fix[0]) == (False, True)
    assert "correction=0" in one.fix[0]


def test_an_fp16_cast_in_the_models_code_is_not_fixed_by_another_precision():
    """The step fails without autocast too, although fp32 could hold the value."""
    found = diagnose(nonfinite(origin(dtype="float16", in_fp32=7e4), fp32=NAN, choices={"precision": "fp16"}))
    assert found.cause == "fp16_overflow"
    assert "model.py:7" in found.fix[0]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_fix_is_never_what_the_run_has_already(precision):
    for evidence in (nonfinite(None, choices={"precision": precision}), grown()):
        assert f"precision={precision}" not in diagnose(replace(evidence, setting=replace(
            evidence.setting, choices={**evidence.setting.choices, "precision": precision}))).fix  # fmt: skip


@pytest.mark.parametrize(
    ("divisor_ops", "cause"),
    [
        (["aten.std"], "zero_variance_norm"),
        (["aten.sqrt", "aten.var"], "zero_variance_norm"),
        (["aten.sqrt", "aten.mean", "aten.pow"], "zero_variance_norm"),
        (["aten.mean", "aten.mul"], "zero_variance_norm"),
        (["aten.sum", "aten.pow"], "unsafe_op"),
        (["aten.mean", "aten.gt"], "unsafe_op"),
        ([], "unsafe_op"),
    ],
)
def test_a_norm_is_known_by_what_it_divides_by(divisor_ops, cause):
    assert diagnose(nonfinite(origin(why="zero_over_zero"), divisor_ops)).cause == cause


@pytest.mark.parametrize(
    ("repeats", "deterministic", "again", "cause"),
    [
        (True, True, FINE, "hardware_fault"),
        (False, True, FINE, "unknown"),
        (None, True, FINE, "unknown"),
        (True, True, NAN, "unknown"),
    ],
)
def test_hardware_is_blamed_only_if_the_replays_agree(repeats, deterministic, again, cause):
    evidence = replace(
        nonfinite(None, deterministic=deterministic),
        outcomes={"same": replace(again, bitwise_equal_to_reading=False)},
        repeats=repeats,
    )
    assert diagnose(evidence).cause == cause


def test_a_spike_that_a_replay_does_not_show_blames_only_a_deterministic_machine():
    again = {"same": replace(FINE, bitwise_equal_to_reading=False), "fp32": FINE}
    evidence = replace(SPIKE, outcomes=again, repeats=True)
    assert diagnose(evidence).cause == "hardware_fault"
    loose = replace(evidence, setting=replace(SETTING, deterministic=False))
    assert diagnose(loose).cause != "hardware_fault"


def test_a_few_huge_weights_are_damage_unless_all_have_moved():
    damage = [Damage("parameter", "w", "1 of 9 values are up to 1e+30", few=True, large=True)]
    assert diagnose(replace(SPIKE, damage=damage)).cause == "corrupt_state"
    rushed = replace(CALM, moved=30.0, share=10.0, grown=1e3)
    assert diagnose(replace(SPIKE, damage=damage, drift=rushed)).cause == "lr_too_high"


def test_the_batch_is_to_blame_if_another_is_normal():
    assert diagnose(replace(SPIKE, outcomes={**SPIKE.outcomes, "fresh_batch": FINE})).cause == "bad_batch"


@pytest.mark.parametrize("fix", ["join the masks", "scale the inputs"])
def test_an_operation_that_another_batch_does_not_reach_is_the_cause_and_the_samples_are_evidence(fix):
    """Two masks of the lowest number overflow for a padded row only; so does a power of a large score."""
    lowest = torch.finfo(torch.float32).max
    read = (Values((2, 2), "float32", lowest), Values((2, 2), "float32", lowest if fix == "join the masks" else 1.0))
    found = replace(origin("aten.add", "overflow"), inputs=read)
    evidence = replace(nonfinite(found), culprits=Culprits([2], True, 6))
    evidence = replace(evidence, outcomes={**evidence.outcomes, "fresh_batch": FINE})
    about = diagnose(evidence)
    assert (about.cause, about.confidence) == ("unsafe_op", 0.8)
    assert fix in about.fix[0]
    assert not any("optimizer.lr" in each for each in about.fix), "the weights are normal"
    assert any("[2]" in line for line in about.evidence)
    assert [each.cause for each in about.also] == ["bad_batch"]
    outlier = replace(evidence, largest_input=LargestInput({"index": 2}, 1e9, 1.0))
    assert diagnose(outlier).cause == "bad_batch", "the data are out of their own range"


def test_two_masks_that_overflow_fp16_are_joined():
    lowest = Values((2, 2), "float16", 65504.0)
    found = replace(origin("aten.add", "overflow", "float16", 131008.0), inputs=(lowest, lowest))
    about = diagnose(nonfinite(found, fp32=FINE, choices={"precision": "fp16"}))
    assert about.cause == "fp16_overflow"
    assert "join the masks" in about.fix[0]


@pytest.mark.parametrize(
    ("sizes", "who", "fix"),
    [
        ((9e4, 8e4, 7e4), "all 3 samples of the batch are", "check the scaling (normalisation) of the data: all 3"),
        ((9e4, 8e4, 1.0), "2 of 3 samples of the batch are", "check the scaling (normalisation) of the data: 2 of 3"),
        ((9e4, 1.0, 1.0), "sample 0 of the batch holds a value of 9e+04;", "clean sample 0 of the batch"),
        ((9e4,), "sample 0 of the batch holds a value of 9e+04;", "clean sample 0 of the batch"),
    ],
)
def test_a_batch_whose_samples_are_all_too_large_is_told_from_one_bad_sample(sizes, who, fix):
    outcomes = {**SPIKE.outcomes, "fresh_batch": FINE}
    found = diagnose(replace(SPIKE, outcomes=outcomes, largest_input=largest_value(sizes, 2.0)))
    assert found.cause == "bad_batch"
    assert found.verdict.startswith(who)
    assert found.verdict.endswith("the largest in another batch is 2")
    assert found.fix[0].startswith(fix)


@pytest.mark.parametrize(
    ("what", "step", "cause"),
    [
        ("parameter", 1, "uninitialised"),
        ("buffer", 1, "uninitialised"),
        ("exp_avg", 1, "corrupt_state"),
        ("parameter", 2, "corrupt_state"),
    ],
)
def test_weights_that_are_not_finite_before_any_update_were_never_initialised(what, step, cause):
    damage = [Damage(what, "head.bias", "3 of 3 values are not finite")]
    found = diagnose(replace(nonfinite(origin()), damage=damage, reading=READING._replace(step=step, loss=math.nan)))
    assert (found.cause, found.also) == (cause, [])
    assert ("initialise head.bias" in found.fix[0]) is (cause == "uninitialised")


def test_first_steps_are_the_inits_fault_only_if_the_first_state_fails_too():
    early = replace(nonfinite(origin()), reading=READING._replace(step=2, loss=math.nan))
    assert diagnose(early).cause == "bad_init"
    learnt = replace(early, outcomes={**early.outcomes, "older_state": FINE}, drift=replace(CALM, share=5.0))
    assert diagnose(learnt).cause == "lr_too_high"


@pytest.mark.parametrize(
    ("size", "step", "cause"), [(1e28, 1, "bad_init"), (1e28, 4, "unsafe_op"), (3.0, 1, "unsafe_op")]
)
def test_a_buffer_of_huge_values_in_the_first_steps_is_the_inits_fault(size, step, cause):
    """BatchNorm's statistics hold what the weights before it have made."""
    found = replace(origin("aten.native_batch_norm", "buffer"), inputs=(Values((2, 2), "float32", size),))
    reading = READING._replace(step=step, buffers=math.inf)
    assert diagnose(replace(nonfinite(found), reading=reading)).cause == cause


def test_a_scale_at_its_floor_has_collapsed_only_where_fp32_is_finite():
    values = {"precision.min_scale": 1.0}
    found = origin("aten.mm", "overflow", "float16", 7e4, direction="backward")
    evidence = nonfinite(found, fp32=FINE, choices={"precision": "fp16"}, values=values)
    evidence = replace(evidence, reading=evidence.reading._replace(loss=3.0))
    assert diagnose(evidence).cause == "loss_scale_collapse"
    inherent = replace(found, why="division_by_zero", in_fp32=math.inf)
    both = replace(evidence, origin=inherent, outcomes={**evidence.outcomes, "fp32": NAN})
    assert diagnose(both).cause == "unsafe_op"


def test_without_evidence_the_cause_is_unknown():
    found = diagnose(replace(SPIKE, outcomes={}, drift=None))
    assert (found.cause, found.confidence, found.fix) == ("unknown", 0.0, []), "no cause, no fix"


def test_a_spike_that_remains_in_the_replay_is_not_a_hardware_fault():
    other = {**SPIKE.outcomes, "same": replace(BAD, bitwise_equal_to_reading=False)}
    assert diagnose(replace(SPIKE, outcomes=other, repeats=True)).cause != "hardware_fault"


@pytest.mark.parametrize(("largest", "fresh", "cause"), [(1e30, FINE, "bad_batch"), (15.0, FINE, "unknown")])
def test_a_huge_finite_input_is_a_bad_batch_and_the_sample_is_named(largest, fresh, cause):
    """If BatchNorm's statistics overflow, no replay counts as normal."""
    reading = READING._replace(buffers=math.inf)
    loud = LargestInput({"index": 3, "source": "digits.csv:41"}, largest, 1.0)
    evidence = replace(
        nonfinite(None, fp32=FINE), reading=reading, largest_input=loud, outcomes={"same": FINE, "fresh_batch": fresh}
    )
    found = diagnose(evidence)
    assert found.cause == cause
    assert cause == "unknown" or found.fix[0] == "clean digits.csv:41"


@pytest.mark.parametrize(("size", "cause"), [(3.0, "unsafe_op"), (1e21, "lr_too_high")])
def test_an_operation_no_rule_knows_is_unsafe_if_it_has_no_result_for_ordinary_values(size, cause):
    found = replace(origin(why="unknown"), inputs=(Values((2,), "float32", size),))
    assert diagnose(nonfinite(found)).cause == cause


def test_only_a_mean_over_targets_blames_the_labels():
    for op, cause in (("aten.nll_loss_forward", "bad_label"), ("aten.mean", "unsafe_op")):
        found = diagnose(nonfinite(origin(op, "mean_of_nothing")))
        assert (found.cause, found.fix) == (cause, ["model.py:7: sum the items and divide by max(n, 1)"])


def test_a_mean_over_the_targets_of_an_empty_batch_is_not_blamed_on_ignored_labels():
    empty = replace(origin("aten.nll_loss_forward", "mean_of_nothing"), inputs=(Values((0, 3), "float32", 0.0),))
    found = diagnose(nonfinite(empty))
    assert found.cause == "bad_label"
    assert "skip an empty batch" in found.fix[0]


@pytest.mark.parametrize("why", ["division_by_zero", "exp_overflow", "zero_variance"])
def test_weights_torn_apart_are_to_blame_wherever_it_breaks_first(why):
    evidence = nonfinite(origin(why=why))
    torn = replace(
        evidence, drift=replace(CALM, share=10.0, grown=1e3), outcomes={**evidence.outcomes, "older_state": FINE}
    )
    assert diagnose(torn).cause == "lr_too_high"
    assert diagnose(replace(torn, drift=CALM)).cause != "lr_too_high"


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"optimizer.lr": 1e-3, "optimizer.weight_decay": 1e5}, "optimizer.weight_decay=0.1"),
        ({"optimizer.lr": 1e5, "optimizer.weight_decay": 0.1}, "optimizer.lr=1e+02"),
        ({"optimizer.lr": 1e-3, "optimizer.weight_decay": 5.0, "optimizer.decay": "independent"}, None),
    ],
)
def test_weight_decay_is_lowered_only_if_it_is_unusually_large(values, fix):
    setting = replace(SETTING, values=values)
    found = diagnose(replace(SPIKE, setting=setting, drift=Drift(10, 20.0, 10.0, 1e3, True)))
    assert found.cause == "lr_too_high"
    assert found.fix[0] == (fix or "optimizer.weight_decay=0.1")


def test_updates_longer_than_the_learning_rate_are_optimizer_staleness():
    """The weights moved further than the learning rate allows, but not further than such long updates explain."""
    far = replace(CALM, steps=2, moved=0.06, share=0.5)
    setting = replace(SETTING, choices={**SETTING.choices, "optimizer": "adamw"})
    setting = replace(setting, values={**SETTING.values, "optimizer.betas": [0.9, 0.999]})
    stale = replace(SPIKE, drift=far, update_length=5.0, setting=setting)
    assert diagnose(stale).cause == "optimizer_staleness"
    assert {"optimizer.betas=[0.9,0.95]", "optimizer=stable_adamw"} <= {*diagnose(stale).fix}
    assert diagnose(replace(stale, update_length=0.9)).cause == "lr_too_high"


@pytest.mark.parametrize(
    ("now", "before", "cause"),
    [(200.0, 50.0, "attention_logit_growth"), (200.0, 150.0, "lr_too_high"), (3.0, 1.0, "lr_too_high")],
)
def test_attention_unknown_to_the_probe_is_judged_by_what_softmax_reads(now, before, cause):
    setting = replace(SETTING, has_attention=False)
    evidence = replace(
        SPIKE, sizes={"monitors/softmax_max": now}, before={"monitors/softmax_max": before}, setting=setting
    )
    assert diagnose(evidence).cause == cause
    assert not any("=" in fix and fix.startswith("qk") for fix in diagnose(evidence).fix)


@pytest.mark.parametrize(
    ("attends", "init", "std", "fix"),
    [
        (True, "normal", 1e12, "init=gpt2"),
        (True, "gpt2", 1e12, "init.std=0.02"),
        (False, "torch", None, "init=fan_in"),
        (False, "normal", 1e30, "init=torch"),
    ],
)
def test_a_suggested_init_is_supported_and_not_the_current_one(attends, init, std, fix):
    setting = replace(
        SETTING, has_attention=attends, choices={**SETTING.choices, "init": init}, values={"init.std": std}
    )
    early = replace(nonfinite(origin()), reading=READING._replace(step=1, loss=math.nan), setting=setting)
    assert (diagnose(early).cause, diagnose(early).fix[0]) == ("bad_init", fix)


@pytest.mark.parametrize(
    ("divisor_ops", "cause"),
    [
        (["aten.linalg_vector_norm", "aten.sub"], "zero_variance_norm"),
        (["aten.mul", "aten.linalg_vector_norm", "aten.mul"], "zero_variance_norm"),
        (["aten.linalg_vector_norm", "aten.mul"], "unsafe_op"),
    ],
)
def test_a_vector_norm_counts_as_a_spread_only_if_centred_or_scaled(divisor_ops, cause):
    assert diagnose(nonfinite(origin(why="zero_over_zero"), divisor_ops)).cause == cause


@pytest.mark.parametrize("why", ["log_of_zero", "zero_variance", "overflow"])
def test_the_evidence_does_not_repeat_the_verdict(why):
    found = diagnose(nonfinite(origin(why=why, dtype="float16", in_fp32=7e4), fp32=FINE))
    assert found.verdict
    assert not any(found.verdict in line for line in found.evidence)


def test_a_bad_sample_comes_before_every_other_cause():
    sample = {"index": 2, "id": 41, "fault": "input", "what": "input holds 1 of 9 values that are NaN or Inf"}
    damage = [Damage("parameter", "w", "1 of 9 values are not finite")]
    found = diagnose(replace(nonfinite(origin()), samples=[sample], damage=damage))
    assert (found.cause, found.fix) == ("poison_input", ["clean sample 41"])


def test_log_z_far_from_0_and_grown_is_drift_unless_all_has_grown():
    drifting = replace(SPIKE, sizes={"monitors/log_z_mean": 140.0}, before={"monitors/log_z_mean": 100.0})
    assert (diagnose(drifting).cause, diagnose(drifting).fix[0]) == ("output_logit_drift", "zloss=palm")
    still = replace(drifting, before={"monitors/log_z_mean": 139.0})
    torn = replace(drifting, drift=replace(CALM, grown=3.0))
    assert {diagnose(still).cause, diagnose(torn).cause} == {"lr_too_high"}


def test_a_number_past_the_end_of_fp32_blames_the_line_if_the_weights_are_as_they_were():
    assert diagnose(nonfinite(origin())).cause == "unsafe_op"
    assert "model.py:7" in diagnose(nonfinite(origin())).fix[0]
    assert diagnose(replace(nonfinite(origin()), drift=replace(CALM, grown=3.0))).cause == "lr_too_high"


def test_gradients_far_above_their_second_moment_are_staleness_unless_the_older_state_fails_too():
    assert diagnose(replace(SPIKE, staleness=50.0)).cause == "optimizer_staleness"
    older = {**SPIKE.outcomes, "older_state": BAD}
    assert diagnose(replace(SPIKE, staleness=50.0, outcomes=older)).cause == "lr_too_high"


@pytest.mark.parametrize(
    ("update_length", "cause"), [(0.33, "lr_too_high"), (1.2, "optimizer_staleness"), (8.0, "optimizer_staleness")]
)
def test_gradients_that_grew_after_an_update_of_ordinary_moments_are_the_learning_rates_fault(update_length, cause):
    """The numbers of `experiment=spiky`: an update 300 times too long, made of m and v that agree."""
    found = diagnose(replace(SPIKE, staleness=346.0, update_length=update_length))
    assert found.cause == cause
    assert any("0.33" in line for line in found.evidence) == (cause == "lr_too_high")
