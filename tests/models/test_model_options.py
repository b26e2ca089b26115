"""The YAML files of models, of their parts and of init: each builds, and has the numbers it states."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from stabletrain import models
from stabletrain.config.rules import CHOSEN_PARTS

CONF = Path(__file__).parents[2] / "conf"
FILLED = {"vocab_size": 256, "block_size": 64, "num_classes": 1000, "in_channels": 3}


def load(group: str, option: str) -> dict[str, Any]:
    """An option's keys without those that only the build reads."""
    keys: Any = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"), resolve=False)
    return {key: value for key, value in keys.items() if key not in ("defaults", "modality")}


def build(option: str, **given: int) -> torch.nn.Module:
    model = load("model", option)
    model |= {key: (FILLED | given)[key] for key, value in model.items() if value is None and key in FILLED}
    parts = {group: load(group, option) for group, option in CHOSEN_PARTS.items()}
    return instantiate(OmegaConf.create({"model": model} | parts).model)


@pytest.mark.parametrize(
    ("option", "given", "size"),
    [
        ("gpt_nano", {}, 853_120),
        ("gpt_mini", {}, 10_818_432),
        ("gpt2", {"vocab_size": 50257, "block_size": 1024}, 124_439_808),
        ("gpt2_medium", {"vocab_size": 50257, "block_size": 1024}, 354_823_168),
        ("gpt2_large", {"vocab_size": 50257, "block_size": 1024}, 774_030_080),
        ("gpt2_xl", {"vocab_size": 50257, "block_size": 1024}, 1_557_611_200),
        ("llama_160m", {"vocab_size": 32000, "block_size": 2048}, 162_426_624),
        ("resnet20", {"num_classes": 10}, 269_722),
        ("nf_resnet20", {"num_classes": 10}, 272_474),
        ("resnet18", {}, 11_689_512),
        ("resnet50", {}, 25_557_032),
    ],
)
def test_a_model_has_the_parameters_its_first_line_states(option: str, given: dict[str, int], size: int) -> None:
    with torch.device("meta"):
        model = build(option, **given)
    assert sum(p.numel() for p in model.parameters()) == size
    stated = re.search(r"([\d.]+) M parameters", (CONF / "model" / f"{option}.yaml").read_text().splitlines()[0])
    assert stated is not None
    digits = len(stated[1].partition(".")[2])
    assert f"{size / 1e6:.{digits}f}" == stated[1]


@pytest.mark.parametrize(
    "path",
    [p for g in ("model", *CHOSEN_PARTS, "zloss", "init") for p in sorted((CONF / g).glob("*"))],
    ids=lambda path: f"{path.parent.name}={path.stem}",
)
def test_an_option_opens_with_its_name_and_names_every_argument(path: Path) -> None:
    keys = load(path.parent.name, path.stem)
    assert path.read_text().startswith(f"# {path.stem}: ")
    target = get_class(keys.pop("_target_"))
    assert set(keys) == set(inspect.signature(target).parameters)
    if dataclasses.is_dataclass(target):
        assert dataclasses.asdict(target(**keys)) == keys


def test_the_null_keys_become_the_sizes_of_the_data() -> None:
    model = build("gpt_nano")
    logits = model(torch.randint(256, (2, 64)))
    assert logits.shape == (2, 64, 256)


@pytest.mark.parametrize("option", ["gpt_nano", "resnet20", "resnet18", "nf_resnet20"])
def test_a_model_in_plain_python_has_the_defaults_of_its_option(option: str) -> None:
    keys = load("model", option)
    parameters = inspect.signature(get_class(keys.pop("_target_"))).parameters
    defaults = {key: parameters[key].default for key in keys}
    for key, value in keys.items():
        if key in CHOSEN_PARTS:
            assert defaults[key] == instantiate(load(key, CHOSEN_PARTS[key])), "off is an object"
        elif value is not None:
            assert (key, defaults[key]) == (key, value)
    sizes = {"block_size": 128, "num_classes": 1000 if option == "resnet18" else 10, "in_channels": 3}
    open_keys = [key for key in sizes if key in keys and keys[key] is None]
    assert {key: defaults[key] for key in open_keys} == {key: sizes[key] for key in open_keys}


def test_every_built_in_model_is_built_and_runs_in_plain_python() -> None:
    gpt = models.GPT(vocab_size=256, n_layer=1)
    assert gpt(torch.randint(256, (2, 128))).shape == (2, 128, 256)
    for name, classes in (("CifarResNet", 10), ("NFResNet", 10), ("TorchvisionResNet", 1000)):
        model = getattr(models, name)()
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, classes)
    assert set(models.__all__) <= set(dir(models))
    assert {get_class(load("model", path.stem)["_target_"]) for path in (CONF / "model").glob("*.yaml")} == {
        getattr(models, name) for name in models.__all__
    }
