"""The notebook in `examples/` runs, and its committed outputs say what it prints today."""

import json
import re

import pytest

from tests import forkserver
from tests.notebooks import cleaned, code_cells, run_cell
from tests.runs import ROOT, python

NOTEBOOK = ROOT / "examples" / "break_and_fix.ipynb"

NAMED = (
    r"step \d+: (\w+) \(",  # the cause
    r"^fix: (.*)$",
    r"^  fix +(.*)$",
    r"^(bitwise equal|fixed by the change)\b",
    r"^((?:broken|fixed) +\w+ +\w+ )",  # the comparison
)
"""What the outputs are compared by, and not by numbers, which depend on the processor."""


def committed():
    """The outputs in the notebook, one text for each code cell."""
    cells = code_cells(json.loads(NOTEBOOK.read_text()))
    return ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]


def names(texts):
    """What `NAMED` finds in the outputs."""
    return [found for text in texts for each in NAMED for found in re.findall(each, text, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.beside
def test_the_notebook_runs_and_its_outputs_name_the_cause_and_the_fix_of_today(tmp_path):
    done = python("-m", "tests.notebooks", str(NOTEBOOK), "--show", cwd=tmp_path, **notebook_environment())
    assert done.returncode == 0, done.stderr
    today = names(json.loads(done.stdout))
    assert "zero_variance_norm" in today
    assert [each for each in today if each.startswith("fixed by")], today
    assert names(committed()) == today


def notebook_environment():
    """The commands of a cell run in forks, which is faster, and read this checkout."""
    return {**forkserver.shims(), "PYTHONPATH": str(ROOT)}


def test_the_committed_outputs_have_no_folder_of_a_machine_no_date_and_no_time():
    for text in committed():
        assert not re.search(r"(?<![\w.])/\w+/|\d{4}-\d\d-\d\d|\d:\d\d|\d k?(tok|img)/s|\d s\b", text), text


def test_an_output_is_cleaned_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"fix: {tmp_path}/mine.py:12\nloss 4  6.33k tok/s  0:32 left\nval loss 2 after 60 steps in 3 s, best\n"
    assert cleaned(text) == (
        "fix: mine.py:12\nloss 4  <pace> tok/s  <time> left\nval loss 2 after 60 steps in <time>, best\n"
    )


@pytest.mark.parametrize(("source", "shown"), [("a = 2\na + 1", "3\n"), ("a = 2\na;", ""), ("None", ""), ("b = 1", "")])
def test_the_value_of_a_cells_last_line_is_printed_as_jupyter_does(capsys, source, shown):
    run_cell(source, {})
    assert capsys.readouterr().out == shown
