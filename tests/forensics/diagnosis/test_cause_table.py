"""Every cause that a rule can give has a row in the package's table and in the documentation."""

import ast
import re
from pathlib import Path

from stabletrain.forensics.diagnosis import causes, fp8_causes, update_causes
from stabletrain.forensics.diagnosis.cause_table import CAUSES

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "incidents.md"


def given_by_rules():
    """The ids in the calls `Diagnosis("<id>", ...)` of the modules with rules."""
    modules = (causes, fp8_causes, update_causes)
    nodes = (node for module in modules for node in ast.walk(ast.parse(Path(module.__file__).read_text())))
    calls = (node for node in nodes if isinstance(node, ast.Call))
    named = [call.args[0] for call in calls if getattr(call.func, "id", "") == "Diagnosis"]
    return {node.value for first in named for node in ast.walk(first) if isinstance(node, ast.Constant)}


def test_every_cause_of_a_rule_has_a_row_and_every_row_a_rule():
    assert given_by_rules() == set(CAUSES)


def test_the_documentation_lists_the_same_causes():
    _, _, table = DOCS.read_text().partition("| cause |")
    rows = table.split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)) == set(CAUSES)


def test_a_bad_sample_is_an_accident_and_a_high_learning_rate_is_not():
    assert CAUSES["poison_input"].accident
    assert not CAUSES["lr_too_high"].accident
