"""Checks that an incident's fixes hold in any training loop."""

import ast
import inspect
import math

import pytest
import torch

from stabletrain.forensics.diagnosis import causes, fp8_causes, update_causes, wording
from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.handler import IncidentHandler
from stabletrain.forensics.incident_list import incidents
from stabletrain.forensics.investigate import IncidentRequest
from stabletrain.forensics.probes.update import trace_update
from stabletrain.guard.in_code import IN_CODE, for_any_loop, in_code
from tests.guard.given import Loop, batches

WRITTEN = sorted(
    {
        node.value
        for module in (causes, wording, fp8_causes, update_causes)
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
    found = for_any_loop(Diagnosis("bad_init", 0.8, "", ["init=gpt2", "init=small"], [], [other]))
    assert found.fix == ["smaller initial weights"]
    assert found.also[0].fix == ["lower the learning rate to 1"]


def test_an_update_that_is_not_finite_is_explained_although_no_closure_can_run_again(tmp_path, monkeypatch):
    loop, withheld = Loop(tmp_path), []
    monkeypatch.setattr(loop.guard._incidents, "investigate", lambda subject, *_: withheld.append(subject))
    x, y = batches(1)[0]
    loop.run([(x * math.nan, y)])
    for parameter in loop.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.Adam(loop.model.parameters(), eps=0)
    (subject,) = withheld
    subject.gap = "the closures return no loss"
    subject.update = lambda: trace_update(loop.model, optimizer, optimizer.step)
    handler = IncidentHandler(10, 60.0)
    handler.open(tmp_path, RunSettings(values={"optimizer.eps": 0, "optimizer.lr": 0.1}), shared=True)
    found = handler.investigate(subject, IncidentRequest("update", limits=(9.0, 9.0)))
    assert (found.diagnosis.cause, found.failures) == ("unsafe_optimizer", [])
    assert found.diagnosis.fix[0] == "eps=1e-08 in the optimizer, so that no denominator is 0"
    handler.write_incident(subject, found)
    ((path, record),) = incidents(tmp_path)
    assert "optimizer's step, which was not" in record["not_replayable"]
    assert {file.name for file in path.iterdir()} == {"diagnosis.json", "report.md", "batch.safetensors"}
