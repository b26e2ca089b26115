"""What tests keep of Hydra's work is what Hydra composes."""

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from stabletrain.config import composed as config
from tests import composing, runs
from tests.runs import CONF, ROOT, TINY_GPT, command

LINES = [
    [],
    ["steps=7", "optimizer.lr=1e-3"],
    ["precision=bf16", "stability=full", "guard.window=30"],
    ["experiment=gpt2_tokens", "data.path=there", "clipping=adagc"],
    ["model=resnet20", "data=digits", "hydra.run.dir=elsewhere"],
    ["+optimizer.mine=3", "++steps=9", "~label_smoothing"],
]
REFUSED = [["precision=bf17"], ["stepps=3"], ["+precision=bf16"], ["optimizer.lr.x=3"]]


def composed(overrides):
    """Returns a configuration as Hydra composes it, without what it interpolates, or the error."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return OmegaConf.to_container(compose("config", overrides, return_hydra_config=True))
        except (ConfigCompositionException, MissingConfigException) as error:
            return str(error)


@pytest.mark.parametrize("overrides", [*LINES, *REFUSED], ids=" ".join)
def test_what_is_kept_is_what_hydra_composes(monkeypatch, overrides):
    kept, again = composed(overrides), composed(overrides)
    loader = composing.config_loader_impl
    monkeypatch.setattr(OmegaConf, "load", staticmethod(composing.load))
    monkeypatch.setattr(loader, "create_defaults_list", composing.create_defaults_list)
    monkeypatch.setattr(loader.ConfigLoaderImpl, "_compose_config_from_defaults_list", composing.merge)
    assert kept == again == composed(overrides)
    assert isinstance(kept, str) == (overrides in REFUSED)


@pytest.mark.parametrize("overrides", LINES, ids=" ".join)
def test_the_defaults_that_are_kept_are_those_that_are_composed(overrides):
    with runs.composed(*overrides):
        first = config.defaults()
        assert first == config.defaults() == config.defaults.__wrapped__()
        first["steps"] = "spoilt"
        assert config.defaults()["steps"] != "spoilt"


@pytest.mark.slow
def test_forks_compose_what_a_fresh_process_does(tmp_path):
    typed = [*TINY_GPT, "clipping=zclip", "optimizer.lr=0.02", "--cfg", "all", "--resolve"]
    fresh = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *typed], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    timeless = [line for line in fresh.stdout.splitlines() if not line.startswith("    dir: ")]
    assert len(timeless) > 300
    for fork in (command(*typed, cwd=tmp_path), command(*typed, cwd=tmp_path)):  # computes it, reads it
        assert [line for line in fork.stdout.splitlines() if not line.startswith("    dir: ")] == timeless


def test_an_option_that_a_test_has_changed_is_read_again(tmp_path):
    (tmp_path / "clipping").mkdir()
    found = []
    for value in (1, 2, 30):
        (tmp_path / "clipping" / "mine.yaml").write_text(f"_target_: builtins.dict\nvalue: {value}\n")
        config = composed([f"hydra.searchpath=[file://{tmp_path}]", "clipping=mine"])
        found.append(config["clipping"]["value"])
    assert found == [1, 2, 30]
