"""The table of import paths that moved: paths, stored configurations and imports."""

import importlib
import subprocess
import sys
from pkgutil import resolve_name

import pytest

from stabletrain.config import moved


@pytest.fixture
def table(monkeypatch):
    """A table of its own: a package, a class of it that went elsewhere, and a module of a package that is gone."""
    monkeypatch.setattr(
        moved,
        "MOVED",
        {
            "stabletrain.old": "stabletrain.stability",
            "stabletrain.old.Special": "stabletrain.models.Special",
            "stabletrain.gone.errors": "stabletrain.errors",
        },
    )
    yield moved.MOVED
    for name in [name for name in sys.modules if name.startswith(("stabletrain.old", "stabletrain.gone"))]:
        del sys.modules[name]


def test_only_whole_names_are_mapped(monkeypatch):
    monkeypatch.setitem(moved.MOVED, "stabletrain.data", "stabletrain.sets")
    assert moved.now("stabletrain.data.text.Text") == "stabletrain.sets.text.Text"
    assert moved.now("stabletrain.database") == "stabletrain.database"
    assert moved.updated(
        {"_target_": "stabletrain.data.A", "b": [{"_target_": "mine.A", "path": "stabletrain.data"}]}
    ) == {
        "_target_": "stabletrain.sets.A",
        "b": [{"_target_": "mine.A", "path": "stabletrain.data"}],
    }


def test_the_longest_beginning_that_moved_decides(table):
    assert moved.now("stabletrain.old.Special") == "stabletrain.models.Special"
    assert moved.now("stabletrain.old.zloss.PaLM") == "stabletrain.stability.zloss.PaLM"
    assert moved.now("stabletrain.errors") == "stabletrain.errors"
    assert moved.now("") == ""


def test_a_stored_tree_is_copied_and_other_values_stay(table):
    tree = {"_target_": 3, "a": [1, "stabletrain.old", {"_target_": "stabletrain.old.x"}], "b": None}
    assert moved.updated(tree) == {
        "_target_": 3,
        "a": [1, "stabletrain.old", {"_target_": "stabletrain.stability.x"}],
        "b": None,
    }
    assert tree["a"][2]["_target_"] == "stabletrain.old.x"


def test_the_finder_answers_for_moved_names_and_no_others(table):
    find = moved.Finder().find_spec
    assert isinstance(find("stabletrain.old").loader, moved.Moved)
    gone = find("stabletrain.gone")
    assert gone.loader is None
    assert gone.submodule_search_locations is not None, "an empty package, so that what is below it can be imported"
    assert find("stabletrain.errors") is None
    assert find("json") is None


def test_a_module_that_is_still_there_is_not_shadowed(table, monkeypatch):
    import stabletrain

    monkeypatch.setitem(table, "stabletrain.errors", "stabletrain.records")
    assert moved.Finder().find_spec("stabletrain.errors", stabletrain.__path__) is None


def test_a_module_of_a_package_that_is_gone_is_imported(table):
    found = importlib.import_module("stabletrain.gone.errors")
    assert found is importlib.import_module("stabletrain.errors")
    assert found.__spec__.name == "stabletrain.errors"


def test_every_new_path_is_there():
    for new in moved.MOVED.values():
        assert resolve_name(new) is not None


def test_the_finder_is_installed_once():
    moved.install()
    before = list(sys.meta_path)
    moved.install()
    assert sys.meta_path == before
    assert sum(isinstance(finder, moved.Finder) for finder in before) == 1


AS_BEFORE = """
import stabletrain
from stabletrain.compare import by_seed
from stabletrain.compare.frames import frame
import stabletrain.comparison.frames as frames
assert by_seed is frames.by_seed and frame is frames.frame
print("compare" in vars(stabletrain))
"""


def test_an_old_package_does_not_take_the_place_of_the_function_of_its_name():
    done = subprocess.run([sys.executable, "-c", AS_BEFORE], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "False\n", done.stderr
