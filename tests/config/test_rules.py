"""Every row of the table of refusals is tried: what breaks it is refused with name, value, bound and fix."""

from dataclasses import replace

import pytest
import yaml

from stabletrain.config.checks import check
from stabletrain.config.composed import composed_job
from stabletrain.config.make import plain
from stabletrain.config.rules import ANY_KEY, ANY_TYPED, RULES
from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks
from tests.runs import CONF, composed

RESNET, MSE = "model=resnet20 data=digits", "objective=mse"

NO_LOGITS = "does nothing with objective=mse, which has no logits of a softmax; fix:"

NO_ATTENTION = "does nothing with model=resnet20, because the model has no attention; fix:"

EXAMPLES = {
    "+stepz=3": "stepz=3: there is no such key; fix: steps=3",
    "+foo=1": "foo=1: there is no such key; fix: leave it out",
    "~optimizer.lr": "optimizer.lr was removed; fix: to turn a group off, use its option that does nothing, such as "
    "none or off",
    "compile=yes": "compile=yes is not auto, true or false; fix: compile=auto, the default",
    "loss_chunk=0": "loss_chunk=0 is not auto, none, or a number of tokens of at least 1; fix: loss_chunk=auto, the "
    "default",
    "warmup.steps=2.5": "warmup.steps=2.5 is not a whole number; fix: warmup.steps=null, the default",
    "wandb.entity=[a]": "wandb.entity=['a'] is not a string; fix: wandb.entity=null, the default",
    "steps=1e3": "steps=1000.0 is not a whole number; fix: steps=1000",
    "optimizer.lr=fast": "optimizer.lr=fast is not a number; fix: optimizer.lr=0.003, the default",
    "wandb.tags=[[0]]": "wandb.tags=[[0]] is not a list of strings; fix: wandb.tags=[], the default",
    "model=[gpt_nano]": "model=[gpt_nano]: a run has one option of model; fix: model=gpt_nano",
    "data.seed=1 data={}": "data={} changes nothing; fix: name an option of data, or set its keys one by one",
    "model={}": "model={} changes nothing; fix: name an option of model, or set its keys one by one",
    "eval_every=9223372036854775808": "eval_every=9223372036854775808 is outside of [-9223372036854775807, "
    "9223372036854775807], the whole numbers of 64 bits; fix: eval_every=500, the default",
    "precision.init_scale=nan": "precision.init_scale=nan is not a number; fix: precision.init_scale=65536.0, the "
    "default",
    "guard.sigma=1e-320": "guard.sigma=1e-320 is nearer to 0 than 1.18e-38, the smallest normal number of fp32; fix: "
    "guard.sigma=6.0, the default",
    "optimizer.weight_decay=1e39": "optimizer.weight_decay=1e+39 is beyond 3.4e+38, the largest number of fp32; fix: "
    "optimizer.weight_decay=0.1, the default",
    "steps=0": "steps=0 is below 1; fix: steps=1 or more",
    "parallel.timeout=0": "parallel.timeout=0 is below 1; fix: parallel.timeout=1 or more",
    "data.length_warmup=-1": "data.length_warmup=-1 is below 0; fix: data.length_warmup=0, which is off, or more",
    "parallel.timeout=1000001": "parallel.timeout=1000001 is above 1000000; fix: parallel.timeout=1000000 or less",
    "seed=-1": "seed=-1 is outside [0, 2^63); fix: seed=0 or more",
    "grad_accum_steps=3": "batch_size=16 does not divide into grad_accum_steps=3 micro-batches; fix: batch_size=15 or "
    "18",
    "data.length_warmup=2000": "data.length_warmup=2000 >= steps=1000: samples never reach their full length; fix: "
    "lower data.length_warmup or raise steps",
    "device=cuda:1": "device=cuda:1 with 2 ranks: all ranks of a machine would use the same GPU; fix: device=cuda, "
    "with which each rank uses its own (CUDA_VISIBLE_DEVICES selects them)",
    "batch_size=5": "batch_size=5 does not divide among 2 ranks x grad_accum_steps=1; fix: batch_size=4 or 6, or "
    "another number of ranks",
    "init_strict=false": "init_strict=false does nothing without init_from; fix: name weights, or leave it out",
    f"{RESNET} qkclip=kimi": f"qkclip=kimi {NO_ATTENTION} qkclip=none, or a model whose YAML has `qkclip: ${{qkclip}}`",
    f"{RESNET} stability=qknorm": f"stability=qknorm sets qknorm=layernorm, which {NO_ATTENTION} stability=none, or a "
    "model whose YAML has `qknorm: ${qknorm}`",
    f"{MSE} zloss=palm": f"zloss=palm {NO_LOGITS} zloss=none, or objective=cross_entropy",
    f"{MSE} loss_chunk=64": f"loss_chunk=64 {NO_LOGITS} loss_chunk=none, or objective=cross_entropy",
    f"{MSE} label_smoothing=0.1": f"label_smoothing=0.1 {NO_LOGITS} label_smoothing=0, or objective=cross_entropy",
    "qkclip=kimi qknorm=rmsnorm": "qknorm=rmsnorm removes the scale of the projections that qkclip=kimi clips, so "
    "qkclip has no effect; fix: qkclip=none, or qknorm=none",
    "model=resnet20": "data=stdlib is for tokens, model=resnet20 reads images; fix: data=digits or data=cifar10, or a "
    "model for tokens such as model=gpt_nano",
    "forecast.horizon=50 monitors=none": "forecast.horizon=50 does nothing with monitors=none, because a forecast "
    "reads what the monitors measure; fix: monitors=default, or leave it out",
    "forecast.action=checkpoint checkpoint=off": "forecast.action=checkpoint keeps no state with checkpoint=off; fix: "
    "checkpoint=default, or forecast.action=alarm",
    "guard.escalate=whatif checkpoint=off": "guard.escalate=whatif goes on from a checkpoint, and checkpoint=off "
    "writes none; fix: checkpoint=default, or guard.escalate=halt",
}
"""What is typed, and the whole message."""

TWO_RANKS = ("device=cuda:1", "batch_size=5")
"""Examples that work in one process."""


def refusal_of(rule, run):
    """Returns the message with which a rule refuses a configuration; None if it does not."""
    try:
        rule.check(run)
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def refusals():
    """For each example, the message of each rule that it breaks, by the rule's number."""
    found = {}
    for example in EXAMPLES:
        with composed(*example.split()) as cfg:
            run = replace(composed_job(plain(cfg)), ranks=Ranks(world_size=2 if example in TWO_RANKS else 1))
            said = {number: refusal_of(rule, run) for number, rule in enumerate(RULES)}
        found[example] = {number: message for number, message in said.items() if message}
    return found


@pytest.mark.parametrize(
    "number", range(len(RULES)), ids=lambda number: f"{RULES[number].keys}: {RULES[number].message}"
)
def test_every_rule_is_broken_by_an_example_with_the_whole_message(refusals, number):
    tried = [example for example, said in refusals.items() if said.get(number) == EXAMPLES[example]]
    assert tried, "add to EXAMPLES what breaks the new row, and its message"


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each not in TWO_RANKS])
def test_an_example_is_refused_by_name_value_and_fix(example):
    with composed(*example.split()) as cfg, pytest.raises(ConfigError) as refusal:
        check(cfg)
    assert str(refusal.value) == EXAMPLES[example]


def test_a_rule_is_about_keys_and_groups_that_exist():
    known = {*yaml.safe_load((CONF / "config.yaml").read_text())}
    for file in CONF.glob("*/*.yaml"):
        known |= {file.parent.name, *(f"{file.parent.name}.{key}" for key in yaml.safe_load(file.read_text()) or {})}
    named = {key for rule in RULES if rule.keys not in (ANY_KEY, ANY_TYPED) for key in rule.keys.split()}
    assert named - known == set()


def test_a_configuration_that_works_breaks_no_rule():
    with composed() as cfg:
        run = composed_job(plain(cfg))
    assert [rule for rule in RULES if refusal_of(rule, run)] == []
