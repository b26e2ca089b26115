"""What docs/development/code_tour.md names exists: the answers of its table, and the path of one training step.

The path has at most 15 files and 3,000 lines, so that a reader can follow a step from the command to the weights.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.runs import ROOT

PAGE = ROOT / "docs" / "development" / "code_tour.md"

ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.read_text(encoding="utf-8").partition("## Where would I change ...?")[2].splitlines()
    if line.startswith("|") and "---" not in line and not line.startswith("| ... |")
]

FILE = re.compile(r"`([\w./]+/[\w.]+\.\w+)`(?:: ((?:`[\w.]+`(?:, )?)+))?")
"""A path, and the symbols to look for in the file."""


SPINE = [
    (path, re.findall(r"`([\w.]+)`", symbols))
    for path, symbols in re.findall(
        r"^\d+\. `([\w./]+\.py)`: ((?:`[\w.]+`,?\s*)+)\.",
        PAGE.read_text(encoding="utf-8").partition("## The spine")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
]
"""The files of the path of one training step, in order, each with the symbols to read in it."""

ON_THE_WAY = {"run_job", "build", "training_loop", "compute", "commit", "apply", "settle", "SkipGuard.gate"}
ON_THE_WAY |= {"SkipGuard.judge", "RollbackGuard.judge", "Rollback.roll_back", "SavedStates.find", "KeptStates.restore"}
ON_THE_WAY |= {"read", "restore"}
"""What every step passes, and the way back to older weights."""


def answers(cell: str) -> dict[str, list[str]]:
    """Returns the symbols by file."""
    return {path: re.findall(r"`([\w.]+)`", symbols or "") for path, symbols in FILE.findall(cell)}


@cache
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


@cache
def names_used(file: Path) -> set[str]:
    """Returns the names and attributes that a module reads, and those that it imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


@cache
def imported(file: Path) -> set[Path]:
    """Returns the modules of the package that a module imports; of a package also those that its `__init__` imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("stabletrain"):
            continue
        place = ROOT / str(node.module).replace(".", "/")
        found |= {place.with_suffix(".py")} if place.with_suffix(".py").is_file() else set()
        if (package := place / "__init__.py").is_file() and package != file:
            found |= {package, *imported(package)}
    return found


def test_the_path_of_a_step_is_short():
    assert 10 <= len(SPINE) <= 15
    missing = [path for path, _ in SPINE if not (ROOT / path).is_file()]
    assert not missing
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path, _ in SPINE)
    assert lines <= 3000, f"{lines} lines: move out what a reader of one step does not need"


def test_the_path_of_a_step_has_every_stage():
    listed = {symbol for _, symbols in SPINE for symbol in symbols}
    assert not ON_THE_WAY - listed


@pytest.mark.parametrize("number", range(len(SPINE)), ids=[path for path, _ in SPINE])
def test_a_file_of_the_path_is_reached_from_the_files_before_it(number):
    path, symbols = SPINE[number]
    missing = {*symbols} - symbols_of(ROOT / path)
    assert symbols, f"say what to read in {path}"
    assert not missing, f"{path} has no {', '.join(sorted(missing))}"
    before = [ROOT / each for each, _ in SPINE[:number]]
    if not before:
        return
    # called, or handed on, by this file or one that the reader has read
    used = set().union(*map(names_used, [*before, ROOT / path]))
    unused = {symbol for symbol in symbols if symbol.rpartition(".")[2] not in used}
    assert not unused, f"nothing on the way to {path} uses {', '.join(sorted(unused))}"
    # imported by an earlier file, or by a module that it imports
    direct = set().union(*map(imported, before))
    assert ROOT / path in direct | set().union(*map(imported, direct)), f"no earlier file leads to {path}"
