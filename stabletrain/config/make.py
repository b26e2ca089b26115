"""Builds the object of a config group from the `_target_` of its chosen option, with Hydra."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from pydoc import ErrorDuringImport, locate
from typing import Any, Generic, Protocol, cast

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from stabletrain.config.moved import updated
from stabletrain.errors import ConfigError, StabletrainError, did_you_mean


def make(cfg: DictConfig, group: str, *roles: type, **given: Any) -> Any:
    """Builds the object of a config group; its arguments are plain Python values, not OmegaConf containers.

    Args:
        cfg: the whole configuration.
        group: the group's name.
        roles: classes that the object must have the public methods and attributes of; it need not derive from them.
        given: arguments besides the option's keys.

    Raises:
        ConfigError: the option has an unknown key, a value is out of bounds, or the object does not fit a role.
    """
    made = instantiated(cfg, group, given)
    for role in roles:
        if missing := missing_parts(made, role):
            target, option = cfg[group].get("_target_"), chosen_option(group)
            raise ConfigError(
                f"{group}={option}: {target} gives a {type(made).__name__}, which has no {', '.join(missing)}: the "
                f"group needs all that {role.__module__}.{role.__qualname__} names; leave {group}._target_ as it is, "
                "or add them"
            )
    return made


def missing_parts(made: Any, role: type) -> list[str]:
    """Returns what an object lacks of a role: public methods, with `()`, and attributes that the class declares."""
    missing = {}
    for base in reversed(role.__mro__):
        if base in (object, Protocol, Generic):
            continue
        members = dict.fromkeys(inspect.get_annotations(base)) | vars(base)
        for name, member in members.items():
            if name == "__call__":
                missing["__call__()"] = not callable(made)
            elif not name.startswith("_"):
                method = inspect.isfunction(member)
                missing[f"{name}()" if method else name] = not has(made, name, method)
    return [name for name, lacking in missing.items() if lacking]


def has(made: Any, name: str, method: bool) -> bool:
    """Returns whether an object has an attribute or a method; one whose value cannot be computed yet counts."""
    try:
        return hasattr(made, name) and (not method or callable(getattr(made, name)))
    except Exception:  # a user's property may raise anything
        return True


def chosen_option(group: str) -> str:
    """Returns the chosen option of a group, inside a Hydra job; else the group's name."""
    return HydraConfig.get().runtime.choices.get(group, group) if HydraConfig.initialized() else group


def instantiated(cfg: DictConfig, group: str, given: Mapping[str, Any]) -> Any:
    """Returns the object that a group's `_target_` gives."""
    node = updated(plain(cfg[group]))
    node.pop("modality", None)  # only the checks read it; the target does not take it
    option = chosen_option(group)
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
