"""Which arms apply: the refusals of a configuration and of the table of resumes, in their own words."""

from dataclasses import replace

import pytest

import stabletrain
from stabletrain.beside.whatif.arms import Arm, catalogue, own_arm, with_fixes
from stabletrain.beside.whatif.base import read_base
from stabletrain.beside.whatif.plan import judge_all, judged, usual_lr
from stabletrain.config.arguments import Arguments
from stabletrain.errors import ConfigError
from tests.once import once
from tests.runs import TINY_RESNET


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    typed = [*TINY_RESNET, "model.depth=8", "steps=40", "precision=fp32", "checkpoint=off", "eval_every=99"]
    typed += ["warmup=none", "report=false", "monitors=none"]
    return once(
        tmp_path_factory, "whatif_resnet", lambda folder: stabletrain.train([*typed, f"hydra.run.dir={folder}"])
    )


def refusals(arms, base):
    return {arm.name: arm.refused for arm in judge_all(arms, base) if arm.refused}


def test_every_arm_applies_to_the_gpt_but_those_that_it_has(shared_run):
    base = read_base(shared_run, 60)
    found = refusals(catalogue(base.settings.choices, base.settings.flat(), base.precision, 60, 60, (40, 60)), base)
    assert found.keys() == {"lr_usual", "beta2", "fp32", "bf16"}


@pytest.mark.slow
def test_the_usual_rate_is_that_of_the_optimizers_option(resnet):
    base = read_base(resnet, 10)
    typed = Arguments(base.arguments.options, [*base.arguments.overrides, "optimizer.lr=0.7"])
    assert usual_lr(replace(base, arguments=typed)) == 0.003
    chosen = {**base.settings.choices, "optimizer": "sgd"}
    assert usual_lr(replace(base, settings=base.settings._replace(choices=chosen))) == 0.1


@pytest.mark.slow
def test_a_resnet_has_no_attention(resnet):
    base = read_base(resnet, 10)
    found = refusals(catalogue(base.settings.choices, base.settings.flat(), base.precision, 10), base)
    brief = {"lr_half_brief", "lr_fifth_brief"}  # they would last to the end of this short run
    assert found.keys() == {"qknorm", "qkclip", "softcap", "beta2", "fp32", "bf16", "mean", "lr_usual", *brief}
    for name in ("qknorm", "qkclip", "softcap"):
        assert "because the model has no attention" in found[name]


@pytest.mark.slow
def test_a_run_without_checkpoints_can_be_repeated(resnet):
    # With checkpoint=off a resume is refused, so an arm turns checkpoints on.
    assert read_base(resnet, 10).saving(()) == ["checkpoint=default"]
    assert not judged(Arm("nothing"), read_base(resnet, 10)).refused


def test_the_table_of_resumes_refuses_in_its_own_words(shared_run):
    base = read_base(shared_run, 60)
    fix = Arm("init=small", ("init=small",), named="diagnosis or forecast")
    assert "initial weights are drawn once, before the first step" in judged(fix, base).refused
    assert "the checkpoint's weights have the sizes" in judged(Arm("m", ("model=gpt_mini",)), base).refused


def test_what_the_run_has_already_is_no_arm(shared_run):
    base = read_base(shared_run, 60)
    assert judged(Arm("same", ("optimizer.lr=3e-3", "clipping=norm")), base).refused == "the run has it already"
    assert judged(Arm("watches", ("monitors=none",)), base).refused == "the run has it already"
    assert not judged(Arm("nothing"), base).refused


def test_what_happens_to_the_state_is_said(shared_run):
    base = read_base(shared_run, 60)
    assert judged(Arm("q", ("qknorm=layernorm",)), base).about.startswith("qknorm: gains start at each channel's mean")
    assert judged(Arm("lr", ("optimizer.lr=0.001",)), base).about == "optimizer.lr 0.003 -> 0.001"


def test_an_own_arm_that_does_not_apply_ends_the_command(shared_run):
    base = read_base(shared_run, 60)
    with pytest.raises(ConfigError, match=r"the arm optimizer.rate=1 does not apply: .*optimizer.rate"):
        judge_all([Arm("nothing"), own_arm("optimizer.rate=1")], base)
    with pytest.raises(ConfigError, match="the arm zloss=pal does not apply: "):
        judge_all([own_arm("zloss=pal")], base)


def test_a_named_fix_that_is_refused_is_only_said(shared_run):
    base = read_base(shared_run, 60)
    arms = with_fixes([Arm("nothing")], ["init=small", "optimizer.lr=0.001"])
    assert [bool(arm.refused) for arm in judge_all(arms, base)] == [False, True, False]
