"""Hydra in this process: what it composes, what it runs, and what it leaves behind."""

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from stabletrain.config.arguments import parse_arguments
from stabletrain.config.jobs import composed, run_as_job
from stabletrain.errors import ConfigError
from tests.runs import CONF


def test_a_composition_has_the_choices_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = HydraConfig.instance().cfg
    with composed(parse_arguments(["qknorm=rmsnorm", "steps=7"]), CONF) as (cfg, choices):
        assert (cfg.steps, choices["qknorm"], HydraConfig.get().runtime.choices["qknorm"]) == (7, "rmsnorm", "rmsnorm")
    assert HydraConfig.instance().cfg is before
    assert not GlobalHydra.instance().is_initialized()
    assert [*tmp_path.iterdir()] == []


def test_an_unknown_option_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match="qknorm=rmsnrm"), composed(parse_arguments(["qknorm=rmsnrm"]), CONF):
        pass


def test_a_job_gets_its_folder_and_its_error_is_raised(tmp_path):
    arguments = parse_arguments(["steps=7", f"hydra.run.dir={tmp_path / 'run'}"])
    seen = []
    assert run_as_job(arguments, CONF, lambda cfg, folder: seen.append((cfg.steps, folder))) == tmp_path / "run"
    assert seen == [(7, tmp_path / "run")]
    assert (tmp_path / "run" / ".hydra" / "config.yaml").exists()
    with pytest.raises(ZeroDivisionError):
        run_as_job(arguments, CONF, lambda cfg, folder: 1 / 0)
    assert not GlobalHydra.instance().is_initialized()
