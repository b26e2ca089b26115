"""Checks of a configuration: types, bounds and combinations, each refused with its value and a fix."""

import math

import pytest
import yaml

from stabletrain.config.arguments import show
from stabletrain.config.checks import check, check_keys, check_ranks
from stabletrain.config.composed import Composed
from stabletrain.config.rules import RULES, fits, kind_of
from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks
from tests.runs import CONF, composed

DEFAULTS = {
    "steps": 1000,
    "optimizer.lr": 3e-3,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.fused": True,
    "precision.fp32_modules": [],
    "device": "auto",
    "warmup.steps": None,
    "mine.anything": None,
    "compile": "auto",
    "loss_chunk": "auto",
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 1),
        ("optimizer.betas", [1, 0.5]),
        ("precision.fp32_modules", ["head"]),
        ("warmup.steps", None),
        ("warmup.steps", 5),
        ("mine.anything", "any type"),
        ("compile", False),
        ("loss_chunk", 4096),
        ("loss_chunk", "none"),
    ],
)
def test_a_value_of_the_defaults_type_is_accepted(key, value):
    check_keys(DEFAULTS | {key: value}, DEFAULTS)


def test_an_int_is_accepted_as_a_float_and_a_bool_never_as_a_number():
    assert fits(1, 0.5)
    assert not fits(0.5, 1)
    assert not fits(True, 0.5)
    assert not fits(True, 1)
    assert not fits(1, True)
    assert fits([], [0.5])
    assert fits(["a", 1], []), "an empty default says nothing of its elements"
    assert not fits([0.5, "a"], [0.5])


def test_types_and_values_in_words():
    assert [kind_of(each) for each in (True, 1, 1.0, "a", [], ["a"], [1])] == [
        "true or false",
        "a whole number",
        "a number",
        "a string",
        "a list of strings",
        "a list of strings",
        "a list of numbers",
    ]
    assert kind_of({}) == "of type dict"
    assert [show(each) for each in (None, True, 3, "x")] == ["null", "true", "3", "x"]


@pytest.mark.parametrize(
    ("batch", "parts", "count", "sizes"), [(16, 1, 3, "15 or 18"), (12, 2, 4, "8 or 16"), (2, 1, 4, "4")]
)
def test_a_batch_that_does_not_divide_among_the_ranks_names_sizes_that_do(batch, parts, count, sizes):
    values = {"batch_size": batch, "grad_accum_steps": parts, "device": "auto"}
    with pytest.raises(ConfigError, match=f"; fix: batch_size={sizes}, or another number of ranks"):
        check_ranks(values, Ranks(world_size=count, launched=True))
    for size in sizes.split(" or "):
        check_ranks(values | {"batch_size": int(size)}, Ranks(world_size=count))


def test_one_card_for_several_ranks_is_refused():
    values = {"batch_size": 8, "grad_accum_steps": 1, "device": "cuda:1"}
    with pytest.raises(ConfigError, match="device=cuda:1 with 4 ranks: .* the same GPU; fix: device=cuda, with which"):
        check_ranks(values, Ranks(world_size=4))
    check_ranks(values, Ranks())
    for device in ("auto", "cpu", "cuda"):
        check_ranks(values | {"device": device}, Ranks(world_size=4))


@pytest.mark.parametrize(
    ("shard", "replicate", "count", "machine", "copies", "fits"),
    [
        (3, None, 4, 4, "3 x 1", 2),
        (2, 3, 4, 4, "2 x 3", 2),
        (None, 3, 4, 4, "1 x 3", 1),
        (None, None, 6, 4, "4 x 1", 3),
        (8, None, 4, 4, "8 x 0", 4),
    ],
)
def test_copies_that_do_not_make_up_the_ranks_are_refused_with_a_size_that_does(
    shard, replicate, count, machine, copies, fits
):
    ranks = Ranks(world_size=count, launched=True, local_world_size=machine)
    values = {"device": "auto", "batch_size": 24, "grad_accum_steps": 1}
    wrong, right = (
        values | {"parallel.shard": each, "parallel.replicate": more}
        for each, more in ((shard, replicate), (fits, None))
    )
    message = f"{copies} is not the number of ranks, {count}; fix: parallel.shard={fits} parallel.replicate=null, or"
    with pytest.raises(ConfigError, match=message):
        check_ranks(wrong, ranks)
    check_ranks(right, ranks)
    check_ranks(wrong, Ranks())  # before torchrun has started them


@pytest.mark.parametrize(
    ("shard", "replicate", "shares"), [(None, None, 4), (2, None, 2), (None, 4, 2), (8, 1, 8), (1, None, 1)]
)
def test_a_copy_is_on_one_machine_unless_its_size_or_the_number_of_copies_is_given(shard, replicate, shares):
    ranks = Ranks(world_size=8, launched=True, local_world_size=4)
    assert ranks.sharing(shard, replicate) == shares
    alike = {"device": "auto", "batch_size": 8, "grad_accum_steps": 1}
    check_ranks(alike | {"parallel.shard": shard, "parallel.replicate": replicate}, ranks)


@pytest.mark.parametrize(
    ("preset", "instead"),
    [
        ("qknorm", "stability=none"),
        ("zloss_qknorm", "stability=none zloss=palm"),
        ("full", "stability=none optimizer=stable_adamw zloss=palm clipping=zclip"),
        ("v100", "stability=none zloss=palm precision=fp16"),
    ],
)
def test_a_preset_for_gpts_names_what_a_resnet_can_take_instead(preset, instead):
    resnet = ["model=resnet20", "data=digits"]
    with composed(*resnet, f"stability={preset}") as cfg, pytest.raises(ConfigError) as refusal:
        check(cfg)
    words = str(refusal.value).partition("; fix: ")[2].partition(", or a model")[0].split()
    assert sorted(words) == sorted(instead.split())
    with composed(*resnet, *words) as cfg:
        check(cfg)


def test_a_configuration_that_works_passes_and_ranks_are_counted(monkeypatch):
    with composed("steps=500", "seed=9223372036854775807") as cfg:
        check(cfg)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(ConfigError, match="does not divide among 3 ranks"):
            check(cfg)


@pytest.mark.parametrize(
    "typed", [["monitors=none"], ["checkpoint=off"], ["forecast=off", "monitors=none"]], ids=" ".join
)
def test_the_default_forecast_refuses_nothing(typed):
    with composed(*typed) as cfg:
        assert check(cfg) is None, "raises nothing"


def test_a_group_with_another_target_may_have_other_keys():
    defaults = DEFAULTS | {"optimizer._target_": "AdamW", "data._target_": "Text"}
    values = {key: value for key, value in defaults.items() if key != "optimizer.fused"}
    values |= {"optimizer._target_": "Adam", "optimizer.amsgrad": True, "optimizer._partial_": True}
    check_keys(values, defaults)
    with pytest.raises(ConfigError, match=r"^optimizer\.lr=fast is not a number"):
        check_keys(values | {"optimizer.lr": "fast"}, defaults)
    with pytest.raises(ConfigError, match=r"^data\.amsgrad=true: there is no such key"):
        check_keys(values | {"data.amsgrad": True}, defaults)
    with pytest.raises(ConfigError, match=r"^optimizer\.amsgrad=true: there is no such key"):
        check_keys(values | {"optimizer._target_": "AdamW"}, defaults)


def test_an_objective_without_logits_is_accepted():
    with composed("objective=mse") as cfg:
        assert check(cfg) is None, "raises nothing"


def test_numbers_that_can_be_used_are_accepted():
    numbers = (0, -1, 2**63 - 1, 0.0, -3.5, 2.0**-126, 3.4e38, math.inf, -math.inf, "nan", None, True)
    own = {"mine._target_": "my.Thing", "mine.x": math.nan, "mine.y": 2**64, "faults.value": math.nan}
    for key, value in [*((f"guard.{n}", number) for n, number in enumerate(numbers)), *own.items()]:
        run = Composed({**own, key: value}, {**own, key: value})
        for rule in RULES:
            if "of 64 bits" in rule.message or "fp32" in rule.message or "a number" in rule.message:
                assert rule.check(run) is None, f"raises nothing of {key}={value}"


def test_every_key_that_may_be_null_has_a_row_with_its_type():
    named = {key for rule in RULES for key in rule.keys.split()}
    for file in CONF.glob("*/*.yaml"):
        for key, value in (yaml.safe_load(file.read_text()) or {}).items():
            assert value is not None or f"{file.parent.name}.{key}" in named, f"{file}: {key}"
