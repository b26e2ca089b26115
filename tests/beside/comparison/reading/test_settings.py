"""Settings of runs as flat mappings: how they are read, which of them differ, and which tell runs apart."""

from dataclasses import dataclass, field

import pytest
import yaml

from stabletrain.beside.comparison.reading.settings import (
    changed_settings,
    distinguishing_keys,
    override_value,
    read_settings,
    setting_text,
    shared_settings,
    split,
    value_of,
    varying_keys,
    without_implied,
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
    """A run that has only settings."""

    settings: dict
    overrides: dict = field(default_factory=dict)
    composed: bool = True


def test_the_composed_configuration_is_flattened_and_a_group_has_its_option_as_value(tmp_path):
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


def test_changes_of_a_resumed_run_count_if_it_trained_with_them():
    changes = [
        {"step": 60, "keys": {"steps": [60, 70], "wandb": ["offline", "disabled"]}},
        {"step": 70, "keys": {"steps": [70, 80], "optimizer.betas": [[0.9, 0.95], [0.9, 0.99]]}},
        {"step": 80, "keys": {"optimizer.lr": [0.003, 0.001]}},
    ]
    assert changed_settings({"final": {"steps": 80}, "changes": changes}) == {
        "steps": 80,
        "optimizer.betas": "[0.9, 0.99]",
    }
    assert changed_settings({"final": {}, "changes": changes})["optimizer.lr"] == 0.001, (
        "a run that is not yet finished"
    )
    assert changed_settings({"final": {}}) == changed_settings({"final": {}, "changes": 3}) == {}


@pytest.mark.parametrize("start", ["# a comment\n\n", "---\n", "%YAML 1.1\n---\n# a comment\n"])
def test_a_configuration_may_begin_with_a_comment(tmp_path, start):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(start + CONFIG)
    assert "".join(split(start + CONFIG)) == CONFIG
    found, composed = read_settings(tmp_path, {}, {})
    assert composed
    assert (found["seed"], found["optimizer.lr"]) == (1, 0.001)


@pytest.mark.parametrize("text", [None, "seed: [1\n", "- a list\n"], ids=["missing", "torn", "no mapping"])
def test_without_a_configuration_the_settings_are_the_overrides_and_choices(tmp_path, text):
    if text is not None:
        (tmp_path / ".hydra").mkdir()
        (tmp_path / ".hydra" / "config.yaml").write_text(text)
    typed = {"optimizer.lr": "1e-3", "seed": "1", "report": "false", "resume": "auto"}
    assert read_settings(tmp_path, {"zloss": "palm"}, typed) == (
        {"optimizer.lr": 0.001, "seed": 1, "zloss": "palm"},
        False,
    )


def test_a_file_is_split_into_blocks_of_one_key_each():
    blocks = split(CONFIG)
    assert "".join(blocks) == CONFIG
    trees = [yaml.safe_load(block) for block in blocks]
    assert [len(tree) for tree in trees] == [1] * 5
    whole = {key: value for tree in trees for key, value in tree.items()}
    assert str(whole) == str(yaml.safe_load(CONFIG)), "compared as text because NaN does not equal itself"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("12", 12), ("0.5", 0.5), ("True", True), ("null", None), ("palm", "palm"), ("1.2.3", "1.2.3")],
)
def test_an_override_is_parsed_as_a_number_a_bool_none_or_text(text, value):
    found = override_value(text)
    assert found == value
    assert type(found) is type(value)


def test_a_setting_is_shown_as_on_the_command_line():
    values = [None, True, 0.001, 1e-9, 300, "palm"]
    assert [setting_text(value) for value in values] == ["-", "true", "0.001", "1e-09", "300", "palm"]


def test_differing_settings_are_listed_overrides_first_and_damaged_runs_are_ignored():
    runs = [
        Set({"seed": 0, "width": 8, "depth": 2, "lr": 0.1}, {"lr": "0.1", "width": "8"}),
        Set({"seed": 1, "width": 16, "depth": 2, "lr": 0.2}, {"lr": "0.2", "width": "16"}),
        Set({}, {}, composed=False),
    ]
    assert varying_keys(runs) == ["lr", "width", "seed"]
    assert shared_settings(runs) == {"depth": 2}


def test_a_run_without_its_configuration_differs_only_in_its_overrides():
    """A setting that it lacks is unknown, and does not count as a difference."""
    runs = [Set({"lr": 0.1, "width": 8}, {"lr": "0.1"}), Set({"lr": 0.2}, {"lr": "0.2"}, composed=False)]
    assert varying_keys(runs) == ["lr"]


def test_a_setting_implied_by_another_is_not_used_to_tell_runs_apart():
    """`stability` is an override and determines `qknorm`; `width` is not, and no other setting determines it."""
    runs = [
        Set({"stability": a, "qknorm": b, "width": w, "seed": s}, {"stability": a, "seed": str(s)})
        for a, b, w, s in [("none", "none", 8, 0), ("full", "layernorm", 8, 1), ("full", "layernorm", 16, 2)]
    ]
    assert distinguishing_keys(runs) == ["stability", "width"]
    assert distinguishing_keys(runs, but=()) == ["stability", "seed"], (
        "the seed differs in every run, so it determines all other settings"
    )
    assert without_implied(runs, ["qknorm", "stability", "width"]) == ["qknorm", "width"]


def test_an_override_that_is_not_a_setting_keeps_its_own_value():
    run = Set({"seed": 0}, {"experiment": "spikes", "seed": "7"})
    assert [value_of(run, key) for key in ("seed", "experiment", "none")] == [0, "spikes", None]
