"""Fixes: options that exist, that this run has not yet, and numbers that follow from its own."""

from dataclasses import replace

import pytest

from stabletrain.forensics.diagnosis.evidence import RUSHED
from stabletrain.forensics.diagnosis.fixes import (
    larger_scale,
    lower_lr,
    more_fp32_modules,
    other_weights,
    past_it,
    slower,
    structure,
    wider,
    younger_moments,
)
from stabletrain.forensics.probes.underflow import Underflow
from tests.forensics.diagnosis.given import CALM, SETTING, SPIKE, origin
from tests.runs import CONF


def run(choices=None, values=None, **setting):
    """The spike of a run that is set so."""
    chosen = {**SETTING.choices, **(choices or {})}
    return replace(SPIKE, setting=replace(SETTING, choices=chosen, values=values or {}, **setting))


@pytest.mark.parametrize(
    ("precision", "fix"), [("fp16", ["precision=bf16"]), ("auto", ["precision=bf16"]), ("bf16", [])]
)
def test_a_wider_format_than_fp16_is_bf16_and_than_bf16_there_is_none(precision, fix):
    assert wider(run({"precision": precision})) == fix


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
def test_a_module_is_kept_in_fp32_where_autocast_chooses_its_format(precision, module, fix):
    assert more_fp32_modules(replace(run({"precision": precision}), origin=origin(module=module))) == fix
    assert more_fp32_modules(run({"precision": precision})) == []


def test_what_keeps_logits_small_is_what_the_model_takes_and_has_not():
    assert structure(run()) == ["qknorm=layernorm", "softcap=gemma2", "zloss=palm"]
    assert structure(run({"qknorm": "rmsnorm"})) == ["softcap=gemma2", "zloss=palm"]
    assert structure(run(has_attention=False)) == ["zloss=palm"]
    assert structure(run(dict.fromkeys(("qknorm", "softcap", "zloss"), "chosen"))) == []


@pytest.mark.parametrize(
    ("cure", "fix"),
    [
        (None, ["precision=bf16"]),
        (2.0**24, ["precision.init_scale=16777216", "precision=bf16"]),
        (1024.0, ["precision=bf16", "precision.growth_interval=200"]),
    ],
    ids=["nothing helps", "a larger scale", "a scale it once had"],
)
def test_the_loss_scale_that_keeps_gradients_is_proposed_or_a_way_back_to_it(cure, fix):
    evidence = run({"precision": "fp16"}, {"precision.init_scale": 65536.0, "precision.growth_interval": 2000})
    assert larger_scale(evidence, Underflow(1.0, 0.5, 0.0, 0.5, cure=cure)) == fix


def test_a_card_without_bf16_is_not_told_to_use_it():
    evidence = run({"precision": "auto"})
    assert larger_scale(evidence, Underflow(1.0, 0.5, 0.0, 0.5)) == ["precision=fp32"]


@pytest.mark.parametrize(
    ("init", "std", "attends", "fix"),
    [
        ("normal", 1.0, True, ["init=gpt2", "init=small"]),
        ("gpt2", 1.0, True, ["init.std=0.02", "init=small"]),
        ("gpt2", 0.02, True, ["init=small"]),
        ("normal", None, False, ["init=torch", "init=fan_in"]),
    ],
)
def test_other_weights_are_of_a_customary_size_and_not_those_of_the_run(init, std, attends, fix):
    assert other_weights(run({"init": init}, {"init.std": std}, has_attention=attends)) == fix


def test_a_lower_rate_is_a_third_and_while_it_lasts_a_longer_warmup_goes_before():
    values = {"optimizer.lr": 3e-3}
    assert lower_lr(run(values=values)) == ["optimizer.lr=0.001"]
    assert lower_lr(run(values=values, warmup=25)) == ["warmup.steps=50", "optimizer.lr=0.001"]
    assert lower_lr(run(values=values, warmup=24)) == ["optimizer.lr=0.001"], "step 50 is past twice the warmup"
    assert lower_lr(run()) == []


def test_a_slower_rate_is_the_one_at_which_a_parameter_moves_by_a_hundredth_of_itself():
    rushed = replace(run(values={"optimizer.lr": 0.5}), drift=replace(CALM, share=5.0, adaptive=False))
    assert slower(rushed) == ["optimizer.lr=0.001"]
    calm = replace(rushed, drift=replace(CALM, share=RUSHED, adaptive=False))
    assert slower(calm) == lower_lr(calm) == ["optimizer.lr=0.17"]


def test_a_weight_decay_that_takes_the_weights_apart_is_lowered_to_a_customary_one():
    values = {"optimizer.lr": 1.0, "optimizer.weight_decay": 5.0}
    assert slower(run(values=values)) == ["optimizer.weight_decay=0.1"]
    of_sgd = replace(run(values=values), drift=replace(CALM, adaptive=False))
    assert slower(of_sgd) == ["optimizer.weight_decay=0.0001"]


@pytest.mark.parametrize(
    ("optimizer", "betas", "fix"),
    [
        ("adamw", [0.9, 0.999], ["optimizer=stable_adamw", "optimizer.betas=[0.9,0.95]"]),
        ("adamw", [0.9, 0.95], ["optimizer=stable_adamw"]),
        ("muon", [0.8, 0.99], ["optimizer.betas=[0.8,0.95]"]),
        ("sgd", None, []),
    ],
)
def test_moments_become_younger_by_another_optimizer_or_a_shorter_memory(optimizer, betas, fix):
    assert younger_moments(run({"optimizer": optimizer}, {"optimizer.betas": betas})) == fix


def test_what_bears_a_bad_batch_is_what_the_run_has_not():
    assert past_it(run({"guard": "skip", "clipping": "norm"})) == ["guard=rollback", "clipping=zclip"]
    assert past_it(run({"guard": "rollback", "clipping": "zclip"})) == []


def test_every_option_that_is_proposed_exists():
    every = run({"precision": "fp16", "optimizer": "adamw", "guard": "skip", "clipping": "norm", "init": "normal"})
    lists = [wider(every), structure(every), other_weights(every), younger_moments(every), past_it(every)]
    lists += [other_weights(replace(every, setting=replace(every.setting, has_attention=False)))]
    lists += [larger_scale(run({"precision": "auto"}), Underflow(1.0, 0.5, 0.0, 0.5))]
    options = {fix for fixes in lists for fix in fixes if "." not in fix}
    assert len(options) == 12
    for group, _, option in (fix.partition("=") for fix in options):
        assert (CONF / group / f"{option}.yaml").exists(), f"{group}={option}"
