"""The fixes: none that the run has, and none that its configuration would refuse."""

import pytest

from stabletrain.beside.forecast.signals import BY_NAME, SIGNALS, fixes
from stabletrain.config.checks import check
from stabletrain.config.make import plain
from tests.runs import composed

ADAM = {"lr": 0.3, "betas": [0.9, 0.999], "weight_decay": 0.1}


def of(signal, choices, optimizer=ADAM):
    return fixes(BY_NAME[signal], choices, optimizer)


def test_what_the_run_does_not_have_is_offered_best_first():
    known = {"qknorm": "none", "qkclip": "none", "optimizer": "adamw"}
    assert of("attention_logits", known) == ("qknorm=layernorm optimizer.lr=0.1", "qkclip=kimi", "optimizer.lr=0.1")
    assert of("g_over_sqrt_v", known) == (
        "optimizer.betas=[0.9,0.95]",
        "optimizer=stable_adamw",
        "optimizer.lr=0.1",
    )


@pytest.mark.parametrize(
    ("signal", "has", "left"),
    [
        ("attention_logits", {"qknorm": "rmsnorm", "qkclip": "none"}, ("optimizer.lr=0.1",)),
        ("attention_logits", {"qknorm": "none", "qkclip": "kimi"}, ("optimizer.lr=0.1",)),
        ("headroom", {"precision": "bf16"}, ("optimizer.lr=0.1",)),
        ("log_z", {"zloss": "palm"}, ("optimizer.lr=0.1",)),
        ("log_z", {"zloss": "olmo"}, ("zloss=palm", "optimizer.lr=0.1")),
        ("activations", {"model": "resnet20", "init": "torch"}, ("optimizer.lr=0.1",)),
        ("activations", {"model": "gpt2", "init": "torch"}, ("optimizer.lr=0.1", "init=gpt2")),
        (
            "g_over_sqrt_v",
            {"optimizer": "muon", "keys": {"betas": [0.9, 0.95], "lr": 0.3}},
            ("optimizer.lr=0.1",),
        ),
        ("norm_variance", {"keys": {"weight_decay": 0.0, "lr": 0.3}}, ("optimizer.lr=0.1",)),
        ("weights", {"keys": {}}, ()),
    ],
)
def test_what_the_run_has_or_would_refuse_is_left_out(signal, has, left):
    choices = {group: option for group, option in has.items() if group != "keys"}
    assert of(signal, choices, has.get("keys", ADAM)) == left


@pytest.mark.slow
def test_every_fix_is_accepted_by_the_run_that_it_is_for():
    choices = {"qknorm": "none", "qkclip": "none", "optimizer": "adamw", "model": "gpt_nano", "init": "torch"}
    every = {fix for signal in SIGNALS for fix in fixes(signal, choices, ADAM)}
    assert len(every) == 10
    for fix in every:
        with composed(*fix.split()) as cfg:
            check(cfg)
    with composed() as cfg:
        default = plain(cfg.optimizer)
    assert "optimizer.betas=[0.9,0.95]" not in of("g_over_sqrt_v", choices, default)
