"""The zoo in short: a fault of each kind is found, called what it is, and found where it is; clean runs have none.

The whole table: `python -m tests.reliability.zoo.run`.
"""

from dataclasses import replace

import pytest

from tests.devices import need_torchao
from tests.reliability.zoo.run import PLAIN, is_override, tell, trained
from tests.reliability.zoo.table import ALL
from tests.words import words

SHORT = [
    "a token out of range",
    "all targets ignored",
    "a flipped bit of a weight",
    "a NaN activation",
    "wrong labels, bright images",
    "one update 10000 times too long",
    "one update 300 times too long, long after the older state, bf16",
    "weights of 1e12",
    "log of a closed gate",
    "root of 0, backward",
    "RMSNorm by hand",
    "a linear layer past 65504",
    "a cast to e4m3 whose scale is too large",
    "an outlier token",
    "queries and keys grow",
]
QUICK = ("a token out of range",)
"""Those of the fast tier."""

BY_NAME = {fault.name: fault for fault in ALL}


def test_no_two_faults_have_one_name():
    assert len(BY_NAME) == len(ALL)
    assert len(ALL) >= 40


@pytest.mark.slow(unless=lambda name: name in QUICK)
@pytest.mark.parametrize("name", SHORT)
def test_a_fault_is_called_what_it_is(tmp_path, name):
    fault = BY_NAME[name]
    need_torchao("fp8" if "precision=fp8" in fault.overrides else "")
    if fault.model == "gpt":  # text that does not depend on the version of Python
        fault = replace(fault, overrides=[*fault.overrides, *words(tmp_path)])
    told = tell(fault)
    assert told.found
    assert told.cause == BY_NAME[name].cause, told.verdict
    assert told.placed is not False, told.origin
    assert told.fixed, told.fix


@pytest.mark.slow(unless=lambda model: model == "gpt")
@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_a_clean_run_has_no_incident(model):
    assert trained(model, ["precision=fp32"], None, False, 60, PLAIN) == ([], "well")


def test_what_can_be_typed_is_told_from_what_must_be_done():
    assert is_override("optimizer.betas=[0.9,0.95]")
    assert not is_override("resume=<run folder> (the last healthy checkpoint)")
    assert not is_override("model.py:12: add eps to what is divided by")
