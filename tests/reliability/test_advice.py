"""Tests of `advice.py`; and one case, the circle that advice once led into."""

import pytest

from tests.reliability.advice import follow, verdict
from tests.reliability.whatif.cases import GPT, Case, Drawn

RIGHT = {"optimizer.lr=0.003": 2.0, "optimizer.lr=1": None}


def run(status="finished", val=2.0, fix="", causes=("lr_too_high",), diverged=False):
    return {"status": status, "val": val, "diverged": diverged, "causes": list(causes), **({"fix": fix} if fix else {})}


HALTED = run("halted", None, "a=1")


@pytest.mark.parametrize(
    ("runs", "ended"),
    [
        ([run(causes=())], ""),
        ([HALTED, run(val=2.1)], "right"),
        ([HALTED, run(val=2.11)], "worse"),
        ([HALTED, run("halted", None, "b=1"), run()], "worse"),
        ([run("halted", None, causes=["unknown"]) | {"fix": ""}], "none"),
        ([run("halted", None, "a=1", causes=["unknown"]), run()], "none"),
        ([HALTED, run("halted", None, "b=1"), HALTED], "loop"),
    ],
)
def test_how_advice_ended(runs, ended):
    assert verdict(runs, RIGHT) == ended


def test_without_a_right_setting_that_trains_nothing_is_right():
    assert verdict([HALTED, run()], {"optimizer.lr=1": None}) == "worse"


@pytest.mark.slow
def test_advice_leads_out_of_a_rate_a_thousand_times_too_high(tmp_path):
    short = [each for each in GPT if not each.startswith("steps=")]
    for number, more in enumerate(((), ("clipping=none",))):
        case = Case("rate/0", Drawn((*short, "steps=150", "optimizer.lr=3", *more), (), ()))
        first, then = follow(case, "skip", tmp_path / str(number))
        assert (first["status"], first["fix"]) == ("halted", "optimizer.lr=0.003")
        assert then["status"] == "finished"
        assert then["val"] < 3
