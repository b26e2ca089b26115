"""Settings of runs as flat mappings: how they are read, which of them differ, and which of these say something new."""

from dataclasses import dataclass, field

import pytest
import yaml

from stabletrain.compare.reading.settings import (
    enough,
    read_settings,
    scalar,
    shared,
    shown,
    split,
    telling,
    value_of,
    varied,
)

CONFIG = """\
seed: 1
optimizer:
  _target_: x.Y
  lr: 0.001
  betas:
  - 0.9
  - 0.95

  # a comment inside
  nested: {deep: true}
clipping:
  max_norm: .nan
wandb:
  mode: disabled
resume: none
"""


@dataclass
class Set:
    """A run as far as its settings go."""

    settings: dict
    overrides: dict = field(default_factory=dict)
    composed: bool = True


def test_the_composed_configuration_is_flat_and_a_group_stands_for_its_option(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(CONFIG)
    found, composed = read_settings(tmp_path, {"clipping": "norm", "wandb": "off", "n": 3}, {"seed": "9"})
    assert composed
    assert found == {
        "seed": 1,
        "optimizer.lr": 0.001,
        "optimizer.betas": "[0.9, 0.95]",
        "optimizer.nested.deep": True,
        "clipping.max_norm": "nan",
        "clipping": "norm",
    }


@pytest.mark.parametrize("text", [None, "seed: [1\n", "- a list\n"], ids=["missing", "torn", "no mapping"])
def test_without_a_configuration_there_is_what_was_typed_and_chosen(tmp_path, text):
    if text is not None:
        (tmp_path / ".hydra").mkdir()
        (tmp_path / ".hydra" / "config.yaml").write_text(text)
    typed = {"optimizer.lr": "1e-3", "seed": "1", "report": "false", "resume": "auto"}
    assert read_settings(tmp_path, {"zloss": "palm"}, typed) == (
        {"optimizer.lr": 0.001, "seed": 1, "zloss": "palm"},
        False,
    )


def test_blocks_make_up_the_file_and_each_is_a_mapping_of_one_key():
    blocks = split(CONFIG)
    assert "".join(blocks) == CONFIG
    trees = [yaml.safe_load(block) for block in blocks]
    assert [len(tree) for tree in trees] == [1] * 5
    whole = {key: value for tree in trees for key, value in tree.items()}
    assert str(whole) == str(yaml.safe_load(CONFIG)), "NaN equals nothing, not even itself"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("12", 12), ("0.5", 0.5), ("True", True), ("null", None), ("palm", "palm"), ("1.2.3", "1.2.3")],
)
def test_what_was_typed_is_a_number_a_truth_value_or_its_text(text, value):
    found = scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_a_setting_is_shown_as_one_would_type_it():
    values = [None, True, 0.001, 1e-9, 300, "palm"]
    assert [shown(value) for value in values] == ["-", "true", "0.001", "1e-09", "300", "palm"]


def test_what_differs_is_named_with_what_was_typed_first_and_a_damaged_run_says_nothing():
    runs = [
        Set({"seed": 0, "width": 8, "depth": 2, "lr": 0.1}, {"lr": "0.1", "width": "8"}),
        Set({"seed": 1, "width": 16, "depth": 2, "lr": 0.2}, {"lr": "0.2", "width": "16"}),
        Set({}, {}, composed=False),
    ]
    assert varied(runs) == ["lr", "width", "seed"]
    assert shared(runs) == {"depth": 2}


def test_of_a_run_without_its_configuration_nothing_differs_but_what_was_typed():
    """What it does not hold is not known, and no difference."""
    runs = [Set({"lr": 0.1, "width": 8}, {"lr": "0.1"}), Set({"lr": 0.2}, {"lr": "0.2"}, composed=False)]
    assert varied(runs) == ["lr"]


def test_what_follows_from_another_setting_tells_runs_apart_no_further():
    """`stability` was typed, and sets `qknorm`; nobody typed `width`, which follows from nothing."""
    runs = [
        Set({"stability": a, "qknorm": b, "width": w, "seed": s}, {"stability": a, "seed": str(s)})
        for a, b, w, s in [("none", "none", 8, 0), ("full", "layernorm", 8, 1), ("full", "layernorm", 16, 2)]
    ]
    assert telling(runs) == ["stability", "width"]
    assert telling(runs, but=()) == ["stability", "seed"], "from the seed, which differs in each, all else follows"
    assert enough(runs, ["qknorm", "stability", "width"]) == ["qknorm", "width"]


def test_a_typed_key_that_is_no_setting_has_the_value_that_was_typed():
    run = Set({"seed": 0}, {"experiment": "spikes", "seed": "7"})
    assert [value_of(run, key) for key in ("seed", "experiment", "none")] == [0, "spikes", None]
