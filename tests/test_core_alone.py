"""Without `stabletrain/beside/` a run trains; what needs the folder says so in one line, and what to do.

`.ci/run` tests the core where the folder is not there at all. These tests hide it from the commands that they start.
"""

import ast
import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from stabletrain.extension import COMMANDS, NoExtension, extension
from tests.conftest import HAS_BESIDE, TESTS, all_beside, is_beside
from tests.runs import ROOT, TINY_GPT, python

HIDDEN = """
import runpy, sys
from stabletrain.extension import extension

hidden = "stabletrain.beside", "stabletrain.adapters"
for name in [name for name in sys.modules if name.startswith(hidden)]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(hidden))
extension.cache_clear()
"""
"""With None in `sys.modules` a package is neither found nor imported, wherever it is installed. A fork may have it."""

TRAIN = f"sys.argv = [{str(ROOT / 'train.py')!r}, *sys.argv[1:]]; runpy.run_path(sys.argv[0], run_name='__main__')"
COMMAND = "runpy.run_module('stabletrain', run_name='__main__')"

QUICK = [*TINY_GPT, "steps=2", "hydra.run.dir=run"]
MISSING = "needs the folder stabletrain/beside, which is not installed"
CASES = {
    "a run": (TRAIN, QUICK, 0, ""),
    "a sweep": (
        TRAIN,
        [*QUICK, "-m", "seed=0,1"],
        2,
        f"stabletrain: a sweep {MISSING}: leave out -m, or install the whole of stabletrain",
    ),
    "a fault": (
        TRAIN,
        [*QUICK, "faults=gradient", "faults.at=[1]"],
        2,
        f"stabletrain: faults=gradient {MISSING}: use faults=none, or install the whole of stabletrain",
    ),
    "a command": (
        COMMAND,
        ["compare", "x"],
        2,
        f"stabletrain: stabletrain compare {MISSING}: install the whole of stabletrain",
    ),
    "a name": (
        "import stabletrain; stabletrain.compare",
        [],
        1,
        f"ModuleNotFoundError: stabletrain.compare {MISSING}: install the whole of stabletrain",
    ),
    "Guard.check": (
        "from stabletrain import Guard; Guard.check(dict)",
        [],
        1,
        f"stabletrain.errors.ConfigError: Guard.check {MISSING}: install the whole of stabletrain",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_needs_the_folder_says_so_in_one_line(tmp_path, case):
    code, typed, exit_code, said = CASES[case]
    done = python("-c", f"{HIDDEN}{code}", *typed, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (exit_code, [said] if said else [])
    assert code is not TRAIN or (tmp_path / "run" / "checkpoints").exists() == (exit_code == 0)
    assert exit_code != 2 or done.stderr.count("\n") == 1
    assert "\nnext " not in done.stdout, "no sweep is suggested"


def test_a_folder_with_left_behind_bytecode_is_no_folder(monkeypatch):
    assert type(extension.__wrapped__()) is not NoExtension or not HAS_BESIDE
    left_behind = ModuleType("stabletrain.beside")
    left_behind.__spec__ = ModuleSpec("stabletrain.beside", None, is_package=True)  # what import finds in such a folder
    monkeypatch.setitem(sys.modules, "stabletrain.beside", left_behind)
    assert type(extension.__wrapped__()) is NoExtension


def test_a_halt_ends_a_run_that_was_to_be_healed(tmp_path):
    wild = ["optimizer=sgd", "optimizer.lr=1e30", "clipping=none", "warmup=none", "guard=skip", "forensics=off"]
    halting = ["guard.max_consecutive=1", "guard.escalate=whatif", "steps=20"]
    done = python("-c", f"{HIDDEN}{TRAIN}", *QUICK, *wild, *halting, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert f"guard.escalate=whatif {MISSING}: install the whole of stabletrain; a halt ends this run\n" in done.stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "halted"


@pytest.mark.beside
def test_the_commands_of_the_folder_are_known_without_it():
    assert [*extension().commands()] == [*COMMANDS]


# ---- the mark `beside`

FOLDER = re.compile(r"stabletrain\.(beside|adapters)\b")

IMPORT = re.compile(r"^(?:import [^\n]+|from [\w.]+ import (?:\([^)]*\)|[^\n(]+))", re.MULTILINE)
"""An import at the top of a module."""


def imported(file, seen):
    """Yields the names that a module of tests imports when it is imported, and those of the others that it imports."""
    for text in IMPORT.findall(file.read_text()):
        names = []
        try:
            [node] = ast.parse(text).body
        except SyntaxError:  # it stands in a string
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            yield name
            found = ROOT.joinpath(*name.split(".")).with_suffix(".py")
            if name.startswith("tests.") and found.is_file() and found not in seen:
                seen.add(found)
                yield from imported(found, seen)


def test_a_file_that_is_not_marked_as_a_whole_is_imported_without_the_folder():
    files = [file for file in sorted(TESTS.rglob("test_*.py")) if not all_beside(file)]
    need = {file.name for file in files if any(map(FOLDER.match, imported(file, {file})))}
    assert need == set(), "import it in the tests that need it, and mark these"
    assert len(files) > 200


@pytest.mark.parametrize("place", ["beside/whatif/test_arms.py", "reliability/test_zoo.py"])
def test_a_place_marks_its_tests(place):
    assert all_beside(TESTS / place)
    assert not all_beside(Path(__file__))


@pytest.mark.beside(when=lambda number: number == 1)
@pytest.mark.parametrize("number", [0, 1])
def test_a_condition_marks_some_cases(request, number):
    assert is_beside(request.node) == (number == 1)
    if request.config.getoption("--beside"):
        assert number == 1


@pytest.mark.beside
def test_a_marked_test_has_the_folder(request):
    assert is_beside(request.node)
    assert (ROOT / "stabletrain" / "beside").is_dir()
