"""Fixes propose options that exist and that the run does not use yet, with values derived from its settings."""

from dataclasses import replace

import pytest

from stabletrain.forensics.diagnosis.evidence import LR_TOO_HIGH
from stabletrain.forensics.diagnosis.wording import (
    faster_second_moment,
    how_to_change,
    larger_loss_scale,
    logit_bounds,
    lower_lr,
    more_fp32_modules,
    other_inits,
    smaller_updates,
    tolerate_batch,
    wider_precision,
)
from stabletrain.forensics.probes.underflow import Underflow
from tests.forensics.diagnosis.given import CALM, SETTING, SPIKE, origin
from tests.runs import CONF


def run(choices=None, values=None, **setting):
    """The spike in a run with these settings."""
    chosen = {**SETTING.choices, **(choices or {})}
    return replace(SPIKE, setting=replace(SETTING, choices=chosen, values=values or {}, **setting))


@pytest.mark.parametrize(
    ("precision", "dtype", "fix"),
    [
        ("fp16", "float16", ["precision=bf16"]),
        ("auto", "float16", ["precision=fp32"]),
        ("auto", "bfloat16", []),
        *((name, "float32", []) for name in ("bf16", "bf16_params", "tf32", "fp32")),
    ],
)
def test_a_wider_range_is_proposed_only_instead_of_fp16(precision, dtype, fix):
    """Every other format has fp32's range, and auto takes fp16 only on a card without bf16."""
    assert wider_precision(replace(run({"precision": precision}), origin=origin(dtype=dtype))) == fix
    assert wider_precision(run({"precision": precision})) == ([] if precision == "auto" else fix)


@pytest.mark.parametrize(
    ("precision", "module", "fix"),
    [
        ("fp16", "blocks.3.attention", ["precision.fp32_modules=[blocks.3.attention]"]),
        ("auto", "head", ["precision.fp32_modules=[head]"]),
        ("fp32", "head", []),
        ("fp16", "objective", []),
        ("fp16", "", []),
    ],
)
def test_fp32_modules_is_proposed_only_for_a_module_under_autocast(precision, module, fix):
    assert more_fp32_modules(replace(run({"precision": precision}), origin=origin(module=module))) == fix
    assert more_fp32_modules(run({"precision": precision})) == []


def test_options_that_limit_logits_are_proposed_if_the_model_supports_and_lacks_them():
    assert logit_bounds(run()) == ["qknorm=layernorm", "softcap=gemma2", "zloss=palm"]
    assert logit_bounds(run({"qknorm": "rmsnorm"})) == ["softcap=gemma2", "zloss=palm"]
    assert logit_bounds(run(has_attention=False)) == ["zloss=palm"]
    assert logit_bounds(run(dict.fromkeys(("qknorm", "softcap", "zloss"), "chosen"))) == []


@pytest.mark.parametrize(
    ("cure", "fix"),
    [
        (None, ["precision=bf16"]),
        (2.0**24, ["precision.init_scale=16777216", "precision=bf16"]),
        (1024.0, ["precision=bf16", "precision.growth_interval=200"]),
    ],
    ids=["nothing helps", "a larger scale", "a scale below the initial one"],
)
def test_a_loss_scale_that_keeps_the_gradients_or_faster_growth_is_proposed(cure, fix):
    evidence = run({"precision": "fp16"}, {"precision.init_scale": 65536.0, "precision.growth_interval": 2000})
    assert larger_loss_scale(evidence, Underflow(1.0, 0.5, 0.0, 0.5, sufficient_scale=cure)) == fix


def test_bf16_is_not_proposed_on_a_gpu_without_it():
    evidence = run({"precision": "auto"})
    assert larger_loss_scale(evidence, Underflow(1.0, 0.5, 0.0, 0.5)) == ["precision=fp32"]


@pytest.mark.parametrize(
    ("init", "std", "attends", "fix"),
    [
        ("normal", 1.0, True, ["init=gpt2", "init=small"]),
        ("gpt2", 1.0, True, ["init.std=0.02", "init=small"]),
        ("gpt2", 0.02, True, ["init=small"]),
        ("normal", None, False, ["init=torch", "init=fan_in"]),
    ],
)
def test_a_proposed_init_has_a_common_std_and_is_not_the_current_one(init, std, attends, fix):
    assert other_inits(run({"init": init}, {"init.std": std}, has_attention=attends)) == fix


def test_the_lower_learning_rate_is_a_third_and_a_longer_warmup_comes_first_near_warmup():
    values = {"optimizer.lr": 3e-3}
    assert lower_lr(run(values=values)) == ["optimizer.lr=0.001"]
    assert lower_lr(run(values=values, warmup=25)) == ["warmup.steps=50", "optimizer.lr=0.001"]
    assert lower_lr(run(values=values, warmup=24)) == ["optimizer.lr=0.001"], "step 50 is past twice the warmup"
    assert lower_lr(run()) == []


def test_the_slower_learning_rate_moves_a_parameter_by_one_percent_per_step():
    rushed = replace(run(values={"optimizer.lr": 0.5}), drift=replace(CALM, share=5.0, adaptive=False))
    assert smaller_updates(rushed) == ["optimizer.lr=0.001"]
    calm = replace(rushed, drift=replace(CALM, share=LR_TOO_HIGH, adaptive=False))
    assert smaller_updates(calm) == lower_lr(calm) == ["optimizer.lr=0.17"]


def test_a_destructive_weight_decay_is_lowered_to_a_common_value():
    values = {"optimizer.lr": 1.0, "optimizer.weight_decay": 5.0}
    assert smaller_updates(run(values=values)) == ["optimizer.weight_decay=0.1"]
    of_sgd = replace(run(values=values), drift=replace(CALM, adaptive=False))
    assert smaller_updates(of_sgd) == ["optimizer.weight_decay=0.0001"]


@pytest.mark.parametrize(
    ("optimizer", "betas", "fix"),
    [
        ("adamw", [0.9, 0.999], ["optimizer=stable_adamw", "optimizer.betas=[0.9,0.95]"]),
        ("adamw", [0.9, 0.95], ["optimizer=stable_adamw"]),
        ("muon", [0.8, 0.99], ["optimizer.betas=[0.8,0.95]"]),
        ("sgd", None, []),
    ],
)
def test_stable_adamw_or_a_smaller_beta2_is_proposed_against_stale_moments(optimizer, betas, fix):
    assert faster_second_moment(run({"optimizer": optimizer}, {"optimizer.betas": betas})) == fix


def test_rollback_and_zclip_are_proposed_against_a_bad_batch_if_not_in_use():
    assert tolerate_batch(run({"guard": "skip", "clipping": "norm"})) == ["guard=rollback", "clipping=zclip"]
    assert tolerate_batch(run({"guard": "rollback", "clipping": "zclip"})) == []
    assert tolerate_batch(replace(run({"guard": "skip", "clipping": "norm"}), kind="nonfinite")) == ["guard=rollback"]


@pytest.mark.parametrize(
    ("direction", "node", "inside"),
    [("backward", "SqrtBackward0", True), ("backward", "DivBackward0", False), ("forward", "", False)],
)
def test_eps_goes_inside_a_root_whose_derivative_divides_by_0(direction, node, inside):
    found = replace(origin(why="zero_over_zero", direction=direction), node=node)
    assert ("add eps inside the root" in how_to_change(found)) is inside


def test_every_proposed_option_exists():
    every = run({"precision": "fp16", "optimizer": "adamw", "guard": "skip", "clipping": "norm", "init": "normal"})
    lists = [
        wider_precision(every),
        logit_bounds(every),
        other_inits(every),
        faster_second_moment(every),
        tolerate_batch(every),
    ]
    lists += [other_inits(replace(every, setting=replace(every.setting, has_attention=False)))]
    lists += [larger_loss_scale(run({"precision": "auto"}), Underflow(1.0, 0.5, 0.0, 0.5))]
    options = {fix for fixes in lists for fix in fixes if "." not in fix}
    assert len(options) == 12
    for group, _, option in (fix.partition("=") for fix in options):
        assert (CONF / group / f"{option}.yaml").exists(), f"{group}={option}"
