"""Messages for a mistyped command line: what was meant, what exists, and None for an error of another kind."""

import pytest
from hydra import compose, initialize_config_dir

from stabletrain.config.arguments import parse_arguments
from stabletrain.config.error_texts import explain, has_key, own_folders, suggestion, unknown_option
from stabletrain.program import conf_folder

FILES = {
    "config.yaml": "defaults:\n  - _self_\n  - optimizer: adamw\n  - zloss: none\nsteps: 5\n",
    "optimizer/adamw.yaml": "_target_: torch.optim.AdamW\nlr: 0.1\nfused: true\n",
    "optimizer/sgd.yaml": "_target_: torch.optim.SGD\nlr: 0.1\nmomentum: 0.9\n",
    "zloss/none.yaml": "_target_: builtins.dict\n",
    "zloss/palm.yaml": "_target_: builtins.dict\ncoefficient: 0.1\n",
}
"""A small project's configuration."""


@pytest.fixture
def conf(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def explained(conf, *typed):
    """What a user reads after a command line that Hydra cannot compose."""
    arguments = parse_arguments(list(typed))
    with initialize_config_dir(str(conf), version_base="1.3"), pytest.raises(Exception) as raised:  # noqa: PT011
        compose("config", arguments.overrides)
    return explain(raised.value, conf, arguments)


def test_a_key_of_another_chosen_option_is_known(conf):
    told = explained(conf, "optimizer=sgd", "optimizer.momentun=1")
    assert told == "optimizer.momentun: there is no such key; did you mean optimizer.momentum?"


def test_the_users_own_options_are_named_too(conf, tmp_path):
    (tmp_path / "own" / "optimizer").mkdir(parents=True)
    (tmp_path / "own" / "optimizer" / "mine.yaml").write_text("_target_: mine.Mine\nspecial: 1\n")
    own = ["--config-dir", str(tmp_path / "own")]
    assert explained(conf, *own, "optimizer=banana").endswith("options of optimizer: adamw, mine, sgd")
    assert explained(conf, *own, "optimizer.special=1").endswith("it belongs to optimizer=mine")


def test_a_missing_config_folder_is_named(conf):
    arguments = parse_arguments(["--config-dir=nowhere"])
    assert explain(RuntimeError(), conf, arguments).startswith("--config-dir nowhere does not exist")


def test_unreadable_yaml_is_reported_in_one_line(conf):
    (conf / "optimizer" / "adamw.yaml").write_text("lr: [1\n")
    told = explained(conf, "steps=5")
    assert told.startswith("a YAML file cannot be read: ")
    assert "\n" not in told
    assert "adamw.yaml" in told


def test_a_run_folder_that_cannot_be_created_is_reported(conf):
    told = explain(PermissionError("denied"), conf, parse_arguments([]))
    assert told == "the run folder cannot be created (denied): choose another hydra.run.dir"


def test_an_error_of_another_kind_is_left_alone(conf):
    with pytest.raises(ZeroDivisionError) as raised:
        _ = 1 / 0
    assert explain(raised.value, conf, parse_arguments([])) is None


def test_own_folders_are_found_in_each_spelling():
    options = ["--config-dir", "a", "-cd", "b", "--config-dir=c", "-cd=d", "-m"]
    assert [str(folder) for folder in own_folders(parse_arguments(options))] == ["a", "b", "c", "d"]


def test_only_whole_keys_of_a_yaml_count(conf):
    assert has_key(conf / "optimizer" / "sgd.yaml", "momentum")
    assert not has_key(conf / "optimizer" / "sgd.yaml", "moment")


def test_nothing_is_proposed_that_is_not_close():
    assert suggestion("steps", ["seed", "device"]) == ""
    assert suggestion("clipping.lr", ["optimizer.lr"]) == "", "a name with its group is not looked for elsewhere"


@pytest.mark.parametrize(
    "typed",
    [
        *("", "steps=3", "-m steps=1,2", "--multirun", "--config-dir own", "-cd=own", "-cn x", "--cfg job", "-c job"),
        *("--help", "--hydra-h", "--config-n x", "steps -1", "--config-dir --steps", "-cdown"),
    ],
)
def test_hydras_own_options_are_left_to_hydra(conf, typed):
    assert unknown_option(typed.split(), conf) is None


def test_a_key_of_the_users_own_option_is_found_without_its_group(conf, tmp_path):
    (tmp_path / "own" / "optimizer").mkdir(parents=True)
    (tmp_path / "own" / "optimizer" / "mine.yaml").write_text("_target_: mine.Mine\nspecial: 1\n")
    words = ["--config-dir", str(tmp_path / "own"), "optimizer=mine", "--special", "2"]
    assert unknown_option(words, conf) == "--special 2: keys are written without dashes: optimizer.special=2"


def test_a_configuration_folder_whose_name_is_too_long_does_not_exist():
    typed = parse_arguments(["--config-dir", "x" * 300])
    assert "does not exist" in (explain(ValueError("x"), conf_folder(), typed) or "")
