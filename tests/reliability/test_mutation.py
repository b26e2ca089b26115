"""Tests of the tools that measure the tests: `mutation.py` and `breaks.py`."""

import ast

import pytest

from tests.reliability import mutation
from tests.reliability.breaks import BREAKS, there
from tests.reliability.covering import Covering
from tests.reliability.equivalent_mutants import EQUIVALENT
from tests.reliability.forked_tests import ROOT

EXAMPLE = """
class Counter:
    limit = 3

    def add(self, by: int | None = 1) -> int | None:
        if by > self.limit:
            raise ValueError(f"{by + 1} is above " + str(self.limit))
        return (
            self.count
            + by
        )
"""


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.what)
def test_text_of_a_break_is_in_its_file_once(each):
    text = (ROOT / there(ROOT, f"stabletrain/{each.file}")).read_text()
    assert text.count(each.old) == 1
    ast.parse(text.replace(each.old, each.new))


@pytest.mark.parametrize("each", EQUIVALENT, ids=lambda each: f"{each[0]}: {each[2]}")
def test_equivalent_mutants_are_of_lines_that_exist(each):
    file, old, _ = each
    assert old in (ROOT / file).read_text()


def test_annotations_and_messages_are_left_out():
    spans = [*mutation.left_out(ast.parse(EXAMPLE))]
    lines = EXAMPLE.split("\n")
    left = {lines[first[0] - 1][first[1] : last[1]] for first, last in spans if first[0] == last[0]}
    assert {"int | None", 'f"{by + 1} is above " + str(self.limit)'} <= left
    assert not any("self.count" in text or "by >" in text for text in left)


def recorded(lines: dict[int, list[str]]) -> Covering:
    seconds = {"tests/test_a.py::slow": 20.0, "tests/test_a.py::own": 3.0, "tests/test_b.py::quick": 1.0}
    return Covering(seconds, {"stabletrain/a.py": lines}, {})


def test_tests_of_a_statement_are_those_of_the_mirror_first_as_long_as_they_fit():
    every = ["tests/test_b.py::quick", "tests/test_a.py::slow", "tests/test_a.py::own"]
    found = mutation.covering_tests(EXAMPLE, "stabletrain/a.py", 10, recorded({9: every, 6: every[:1]}))
    assert found == ["tests/test_a.py::own", "tests/test_b.py::quick"]  # the slow one exceeds `TESTS_TAKE`


def test_a_line_that_runs_on_import_has_the_tests_of_its_class():
    found = mutation.covering_tests(EXAMPLE, "stabletrain/a.py", 3, recorded({3: [], 6: ["tests/test_b.py::quick"]}))
    assert found == ["tests/test_b.py::quick"]


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = recorded({9: ["tests/test_a.py::own"]})
    record.write(tmp_path / "covering.json")
    assert Covering.read(tmp_path / "covering.json") == record


def test_interval_is_wilsons():
    low, high = mutation.wilson(45, 50)
    for bound in (low, high):  # Wilson's bounds are where the normal test of the share is at its limit
        assert abs(0.9 - bound) == pytest.approx(1.6449 * (bound * (1 - bound) / 50) ** 0.5)
    assert low < 0.9 < high
