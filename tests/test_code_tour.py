"""The table at the end of docs/code_tour.md names files and symbols that exist, at most three files per answer."""

import ast
import re
from pathlib import Path

import pytest

from tests.runs import ROOT

PAGE = ROOT / "docs" / "code_tour.md"

ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.read_text(encoding="utf-8").partition("## Where would I change ...?")[2].splitlines()
    if line.startswith("|") and "---" not in line and not line.startswith("| ... |")
]

FILE = re.compile(r"`([\w./]+/[\w.]+\.\w+)`(?:: ((?:`[\w.]+`(?:, )?)+))?")
"""A path, and the symbols to look for in the file."""


def answers(cell: str) -> dict[str, list[str]]:
    """Returns the symbols by file."""
    return {path: re.findall(r"`([\w.]+)`", symbols or "") for path, symbols in FILE.findall(cell)}


def symbols_of(file: Path) -> set[str]:
    """Returns the functions, classes, methods and constants of a module, by the names that the page uses."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            body = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{each.name}" for each in body if isinstance(each, ast.FunctionDef)}
    return found


def test_there_are_ten_questions():
    assert len(ROWS) >= 10
    assert all(len(row) == 2 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_an_answer_names_what_exists(row):
    named = answers(row[1])
    assert 1 <= len(named) <= 3, "a reader opens at most three files"
    assert row[1].count("`") == 2 * (len(named) + sum(map(len, named.values()))), "a path or symbol is not read"
    for path, symbols in named.items():
        assert (ROOT / path).is_file(), f"there is no {path}"
        assert symbols or not path.endswith(".py"), f"say what to look for in {path}"
        missing = {*symbols} - (symbols_of(ROOT / path) if symbols else set())
        assert not missing, f"{path} has no {', '.join(sorted(missing))}"
