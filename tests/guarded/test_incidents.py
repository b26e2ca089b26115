"""Checks that an incident's fixes hold in any training loop."""

import ast
import inspect

import pytest

from stabletrain.forensics.diagnosis import causes, fixes, fp8_causes
from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.guarded.incidents import IN_CODE, in_code, of_any_loop

WRITTEN = sorted(
    {
        node.value
        for module in (causes, fixes, fp8_causes)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if "=" in node.value and " " not in node.value and node.value[0].isalpha() and "(" not in node.value
    }
)
"""Beginnings of the overrides that the rules may suggest."""


def test_the_rules_suggest_overrides():
    assert {"precision=bf16", "optimizer.lr=", "guard=rollback"} <= {*WRITTEN}


@pytest.mark.parametrize("fix", WRITTEN)
def test_no_override_of_train_py_is_left(fix):
    whole = {"precision=": "precision=bf16"}.get(fix, f"{fix}0.1" if fix.endswith("=") else fix)
    words = in_code(whole)
    assert words != whole
    assert " " in words


def test_values_are_kept_and_sentences_are_left_alone():
    assert in_code("optimizer.lr=0.0003") == "lower the learning rate to 0.0003"
    assert in_code("precision.fp32_modules=[head]").startswith("run head in fp32")
    assert in_code("mine.py:7: add eps to the divisor") == "mine.py:7: add eps to the divisor"
    assert all("{}" not in in_code(f"{begins}1") for begins in IN_CODE)


def test_contributing_causes_are_translated_too_and_none_is_said_twice():
    other = Diagnosis("lr_too_high", 0.8, "", ["optimizer.lr=1"], [])
    found = of_any_loop(Diagnosis("bad_init", 0.8, "", ["init=gpt2", "init=small"], [], [other]))
    assert found.fix == ["smaller initial weights"]
    assert found.also[0].fix == ["lower the learning rate to 1"]
