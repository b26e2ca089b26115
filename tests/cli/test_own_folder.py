"""Runs and sweeps that begin within the same second have folders of their own; a folder that the user names stays."""

import warnings
from pathlib import Path

import pytest
from hydra import compose
from hydra._internal.callbacks import Callbacks

from stabletrain.cli.own_folder import create_unique, named_by_time
from stabletrain.config.arguments import Arguments
from stabletrain.config.jobs import hydra
from tests.runs import CONF


def begun(*overrides):
    """The run folder that Hydra takes after it has notified the callbacks of `conf/config.yaml`."""
    with hydra(Arguments([], [*overrides]), CONF) as name, warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = compose(name, [*overrides], return_hydra_config=True)
        Callbacks(cfg).on_run_start(config=cfg, config_name=name)
        return cfg.hydra.run.dir


def test_each_run_of_the_same_second_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = "hydra.run.dir='outputs/${now:today}'"  # a "time" that stays the same
    assert [begun(folder) for _ in range(3)] == ["outputs/today", "outputs/today-2", "outputs/today-3"]
    assert sorted(path.name for path in Path("outputs").iterdir()) == ["today", "today-2", "today-3"]


def test_the_default_folder_is_created_for_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in Path("outputs").glob("*/*")] == []
    folder = begun()
    assert [str(path) for path in Path("outputs").glob("*/*")] == [folder]


def test_a_folder_that_the_user_names_is_taken_as_it_is(tmp_path):
    (tmp_path / "run").mkdir()
    assert begun(f"hydra.run.dir={tmp_path / 'run'}") == str(tmp_path / "run")
    assert begun(f"hydra.run.dir={tmp_path / 'new'}") == str(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_name_that_cannot_be_resolved_is_left_to_hydra():
    with pytest.raises(Exception, match="nowhere"):
        begun("hydra.run.dir='${nowhere}/${now:%H}'")


def test_a_folder_that_cannot_be_created_is_left_to_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    assert create_unique(tmp_path / "file" / "run") == tmp_path / "file" / "run"


def test_a_sweep_is_named_by_the_time_too():
    with hydra(Arguments([], []), CONF) as name:
        cfg = compose(name, return_hydra_config=True)
        assert named_by_time(cfg.hydra.sweep)
        assert not named_by_time(compose(name, ["hydra.sweep.dir=here"], return_hydra_config=True).hydra.sweep)
