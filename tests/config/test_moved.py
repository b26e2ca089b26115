"""The table of import paths that moved: paths and stored configurations."""

from pkgutil import resolve_name

import pytest

from stabletrain.config import moved


@pytest.fixture
def table(monkeypatch):
    """A table of its own: a package, and a class of it that went elsewhere."""
    monkeypatch.setattr(
        moved,
        "MOVED",
        {
            "stabletrain.old": "stabletrain.stability",
            "stabletrain.old.Special": "stabletrain.models.Special",
        },
    )


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


def test_the_longest_prefix_that_moved_decides(table):
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


BESIDE = "stabletrain.beside"


@pytest.mark.beside(when=lambda new: new.startswith(BESIDE))
@pytest.mark.parametrize("new", sorted({*moved.MOVED.values()}))
def test_every_new_path_is_there(new):
    assert resolve_name(new) is not None
