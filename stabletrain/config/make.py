"""Builds the object of a config group from the `_target_` of its chosen option, with Hydra."""

import sys
from collections.abc import Iterator
from pydoc import ErrorDuringImport, locate
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from stabletrain.config.moved import updated
from stabletrain.errors import ConfigError, StabletrainError, did_you_mean


def make(cfg: DictConfig, group: str, **given: Any) -> Any:
    """Builds the object of a config group; its arguments are plain Python values, not OmegaConf containers.

    Raises:
        ConfigError: the option has an unknown key, or a value is out of bounds.
    """
    node = updated(plain(cfg[group]))
    node.pop("modality", None)  # only the checks read it; the target does not take it
    option = HydraConfig.get().runtime.choices.get(group, group) if HydraConfig.initialized() else group
    if "_target_" not in node:
        raise ConfigError(f"{group}={option}: its YAML has no _target_, so there is nothing to build")
    try:
        return instantiate(node, **given, _convert_="all")
    except InstantiationException as error:
        cause = innermost(error)  # Hydra wraps the option's own error
        if isinstance(cause, StabletrainError):
            raise cause from None
        module, _, name = node["_target_"].rpartition(".")
        known = vars(sys.modules[module]) if module in sys.modules else {}
        hint = "" if name in known else did_you_mean(name, known)
        if isinstance(cause, ModuleNotFoundError) and cause.name == module.partition(".")[0]:
            hint = "; if it is your own code, set PYTHONPATH to its folder"
        raise ConfigError(f"{group}={option} cannot be built from {node['_target_']}: {cause}{hint}") from error


def target_of(cfg: DictConfig, group: str) -> Any:
    """Returns the class or function that a group's `_target_` names; None if it cannot be imported."""
    try:
        return locate(updated(plain(cfg[group])).get("_target_", ""))
    except ErrorDuringImport:  # `make` names the problem
        return None


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Converts a configuration to plain Python values, with interpolations resolved."""
    return cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True))


def innermost(error: BaseException) -> BaseException:
    """Returns the first error of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every `(dotted key, value)` below `tree`; lists are values."""
    if isinstance(tree, dict) and (tree or not prefix):
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), tree
