"""A plan of several kinds of faults, and the options that name one kind each."""

import math
from dataclasses import fields

import pytest
import yaml

from stabletrain.beside.faults import Plan
from stabletrain.beside.faults.plan import KINDS
from stabletrain.errors import ConfigError
from stabletrain.extension import NoFaults
from stabletrain.records import IGNORE_INDEX
from tests.beside.faults.given import (
    INF,
    Scaled,
    Tokens,
    bad_elements,
    differing,
    fresh,
    gradients,
    option,
    step,
    weights,
)
from tests.runs import CONF


@pytest.mark.parametrize("kind", KINDS)
def test_an_options_keys_are_its_kinds(kind):
    tree = yaml.safe_load((CONF / "faults" / f"{kind}.yaml").read_text())
    assert set(tree) - {"_target_"} == {field.name for field in fields(KINDS[kind])}
    assert type(option(kind)) is KINDS[kind]


def test_every_other_option_is_none_or_a_plan():
    options = {file.stem for file in (CONF / "faults").glob("*.yaml")}
    assert options >= {*KINDS, "none", "plan"}
    made = {name: type(option(name)) for name in options - set(KINDS)}
    assert made == {name: NoFaults if name == "none" else Plan for name in made}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"kind": "gradeint", "at": [1]},
            r"faults.faults\[0\]: kind=gradeint is not a kind of fault; did you mean gradient\?",
        ),
        ({"kind": "gradient", "at": [1], "valeu": 1}, r"gradient has no key valeu; did you mean value\?"),
        ({"kind": "kill"}, r"kill has no at: write \{kind: kill, at: \[30\]\}"),
        ({"at": [1]}, "has no kind"),
        ("gradient", "has no kind"),
        ({"kind": "poison", "at": [-1]}, r"faults.faults\[0\], poison: faults.at=\[-1\]"),
        ({"kind": "bitflip", "at": [1], "where": "wieght"}, "faults.where=wieght is none of weight"),
        ({"kind": "label", "at": [1], "value": IGNORE_INDEX}, "use faults=ignored"),
        ({"kind": "learning_rate", "at": [1], "factor": 0.0}, "faults.factor=0.0 is not above 0"),
    ],
    ids=["kind", "key", "no at", "no kind", "a word", "at", "where", "ignored", "factor"],
)
def test_an_invalid_plan_is_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        Plan([entry])


def test_a_plan_reads_nan_and_inf_that_yaml_reads_as_strings():
    assert math.isnan(Plan([{"kind": "gradient", "at": [1], "value": "nan"}]).faults[0].value)
    assert Plan([{"kind": "input", "at": [1], "value": "-inf"}]).faults[0].value == -INF


def test_kinds_of_a_plan_meet_in_one_run():
    chosen = Plan(
        [{"kind": "gradient", "at": [1]}, {"kind": "bitflip", "at": [1], "bit": 0}, {"kind": "label", "at": [2]}]
    )
    state = fresh()
    chosen.state(state, Scaled())
    step(state)
    before = weights(state)
    step(state, applied=False)
    assert bad_elements(gradients(state)) == 1
    assert differing(before, weights(state)) == 1
    assert chosen.data(Tokens()).batch(2, 2, "train").targets.max() == 10**6
