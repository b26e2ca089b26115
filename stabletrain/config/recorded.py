"""Reads `.hydra/config.yaml`, the configuration with which a run began."""

from pathlib import Path
from typing import Any, TypedDict, cast

from omegaconf import DictConfig, OmegaConf

from stabletrain.config import trust
from stabletrain.config.make import load_yaml, plain
from stabletrain.stored.json_files import DamagedFile, MissingFile, check_plain, check_type


class Group(TypedDict):
    """The option of a config group."""

    _target_: str


class Configuration(TypedDict):
    """What is read again of a run's configuration; further keys may hold anything."""

    model: Group
    data: Group


def read_config(file: Path) -> DictConfig:
    """Returns the configuration in a file.

    Raises:
        MissingFile: there is none.
        DamagedFile: it cannot be read, is no YAML, or is not the configuration of a run.
        ConfigError: it names unknown code.
    """
    if not file.exists():
        raise MissingFile(f"{file} is missing")
    try:
        cfg = check_config(load_yaml(file))
    except Exception as error:  # YAML and OmegaConf raise many types
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise DamagedFile(f"{file} is damaged: {reason or type(error).__name__}") from error
    trust.check_config(cfg, file)
    return cfg


def check_config(found: Any) -> DictConfig:
    """Returns a recorded configuration after checking it.

    Raises:
        Exception: it is not the configuration of a run.
    """
    cfg = found if isinstance(found, DictConfig) else OmegaConf.create(found)
    values = OmegaConf.to_container(cfg)
    check_plain(values)
    check_type(values, Configuration)
    for group in ("model", "data"):
        check_plain(plain(cfg[group]))  # resolves what it refers to
    return cast("DictConfig", cfg)
