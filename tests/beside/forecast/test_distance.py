"""A run unlike those of the fit gets its signals, no percentage, and no fix that would change nothing."""

import math
from dataclasses import replace

import pytest

import stabletrain.beside.forecast.forecast as room
from stabletrain.beside.forecast.distance import RECORDED, distance
from stabletrain.beside.forecast.forecast import Forecast
from stabletrain.beside.forecast.model import fitted
from tests.reliability.foresight.cases import all_cases

NEAR = {"model": "gpt_nano", "optimizer": "adamw", "precision": "fp32", "clipping": "none"}


def said(choices, metrics, steps=range(25, 500, 25)):
    """The predictions of a run; `metrics` is a function of the step."""
    forecast = Forecast(500, "alarm")
    forecast.set_run(choices, {"lr": 1e-3})
    return [each for step in steps for each in forecast.look(step, {"lr": 1e-3, **metrics(step)})]


def large(step):
    """Weights and gradients that are large, and stay so: a model of another kind, which trains well."""
    return {"grad/norm": 90.0, "monitors/weight_rms/a": 90.0}


def growing(step):
    """Updates that grow to as long as the weights."""
    return {"monitors/update_ratio/a": 0.02 * math.exp(step / 120)}


def test_a_recorded_kind_of_run_gets_a_percentage_and_all_fixes():
    found, *_ = said(NEAR, large)
    assert 0.88 < found.probability < 1
    assert "of 100 runs like this break or end worse; fix: " in found.text
    assert found.fix
    assert found.fields()["probability"] == round(found.probability, 4)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": "mine"}, "fitted on small built-in GPTs and ResNets; this is model=mine"),
        ({"model": "gpt2"}, "this is model=gpt2"),
        ({"model": ""}, "this is neither"),
        ({"optimizer": "spam"}, "optimizer=adamw, sgd, muon; this is spam"),
        ({"precision": "fp8"}, "precision=fp32, bf16, fp16; this is fp8"),
        ({"norm_placement": "sandwich"}, "norm_placement=pre; this is sandwich"),
    ],
)
def test_another_run_gets_its_signals_and_no_percentage(changed, told):
    found, *_ = said(NEAR | changed, growing)
    assert told in distance(NEAR | changed)
    assert told in found.text
    assert "of 100" not in found.text
    assert found.text.startswith("updates over weights of a ")
    assert math.isnan(found.probability)
    assert found.fields()["probability"] is None


def test_a_fix_is_named_from_afar_only_if_the_alarm_would_end():
    mine = NEAR | {"model": "mine"}
    assert {each.fix for each in said(mine, large)} == {()}
    assert "fix:" not in said(mine, large)[0].text
    assert said(mine, growing)[0].fix == ("optimizer.lr=0.00033",)


def test_clipping_does_not_change_the_norm_before_clipping(monkeypatch):
    monkeypatch.setattr(room, "fitted", lambda: replace(fitted(), alarm=0.7))

    def norms(step):
        return {"grad/norm": 10.0 * math.exp(step / 500)}

    near, far = said(NEAR, norms)[0], said(NEAR | {"model": "mine"}, norms)[0]
    assert near.fix[0] == "clipping=norm"
    assert "clipping=norm" not in far.fix


def test_the_recorded_options_are_those_of_the_campaign():
    words = {word for case in all_cases() for word in case.overrides}
    for group in ("optimizer", "precision"):
        assert {word.partition("=")[2] for word in words if word.startswith(f"{group}=")} <= {*RECORDED[group]}


def test_a_rate_is_lowered_until_updates_are_as_short_as_in_healthy_runs():
    forecast = Forecast(500, "alarm")
    forecast.set_run(NEAR, {"lr": 3.0})
    (long,) = forecast.look(1, {"lr": 3.0, "grad/norm": 90.0, "monitors/update_ratio/a": 10.0})
    assert long.fix[-1] == f"optimizer.lr={3.0 / (10.0 / fitted().healthy['update_ratio']):.2g}"
    assert said(NEAR, large)[0].fix[-1] == "optimizer.lr=0.00033", "a third where updates are not long"


@pytest.mark.parametrize(("usual", "fix"), [(3e-3, "0.003"), (0.3, "0.3"), (0.31, "1"), (None, "1"), (9.0, "1")])
def test_a_rate_far_above_the_usual_one_is_lowered_to_it(usual, fix):
    forecast = Forecast(500, "alarm")
    forecast.set_run(NEAR, {"lr": 3.0}, usual)
    (found,) = forecast.look(1, {"lr": 3.0, **large(1), "monitors/update_ratio/a": 0.9})
    assert found.fix[-1] == f"optimizer.lr={fix}"
