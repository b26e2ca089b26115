"""Builds the object of a config group from the `_target_` of its chosen option, with Hydra."""

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any, Generic, Protocol, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from stabletrain.config.moved import now, updated
from stabletrain.errors import ConfigError, StabletrainError, did_you_mean
from stabletrain.stored.json_files import read_file

Made = TypeVar("Made")


@dataclass(frozen=True)
class Choice(Generic[Made]):
    """The chosen option of a config group, which builds the group's object.

    Attributes:
        group: the group's name.
        node: the option's keys and values, plain and resolved.
        option: the option's name; empty if it is unknown.
        role: class that the object must have the public methods and attributes of; it need not derive from it. None for
            any object.
    """

    group: str
    node: Mapping[str, Any]
    option: str = ""
    role: Any = None

    @classmethod
    def of(
        cls, config: Mapping[str, Any], group: str, role: Any = None, choices: Mapping[str, str] | None = None
    ) -> "Choice[Made]":
        """Returns the choice of a group in a configuration, which may be OmegaConf's or plain."""
        return cls(group, plain(config[group]), (choices or {}).get(group, ""), role)

    @property
    def target(self) -> str:
        """The path of what builds the object, where it lies today; empty if the option names none."""
        return now(str(self.node.get("_target_", "")))

    @property
    def code(self) -> Any:
        """The class or function that the target names; None if it cannot be imported."""
        try:
            return locate(self.target)
        except ErrorDuringImport:  # `build` names the problem
            return None

    def build(self, **given: Any) -> Made:
        """Builds the object; its arguments are plain Python values, not OmegaConf containers.

        Args:
            given: arguments besides the option's keys, or instead of them.

        Raises:
            ConfigError: the option has an unknown key, a value is out of bounds, or the object does not fit the role.
        """
        made = self._instantiated(given)
        if self.role is not None and (missing := missing_parts(made, self.role)):
            raise ConfigError(
                f"{self}: {self.node['_target_']} gives a {type(made).__name__}, which has no {', '.join(missing)}: "
                f"the group needs all that {self.role.__module__}.{self.role.__qualname__} names; leave "
                f"{self.group}._target_ as it is, or add them"
            )
        return made

    def _instantiated(self, given: Mapping[str, Any]) -> Any:
        if not self.target:
            raise ConfigError(f"{self}: its YAML has no _target_, so there is nothing to build")
        # only the checks read the modality; the target does not take it
        node = {key: value for key, value in updated(dict(self.node)).items() if key != "modality"}
        try:
            return instantiate(node, **given, _convert_="all")
        except InstantiationException as error:
            cause = innermost(error)  # Hydra wraps the option's own error
            if isinstance(cause, StabletrainError):
                raise cause from None
            module, _, name = self.target.rpartition(".")
            known = vars(sys.modules[module]) if module in sys.modules else {}
            hint = "" if name in known else did_you_mean(name, known)
            if isinstance(cause, ModuleNotFoundError) and cause.name == module.partition(".")[0]:
                hint = "; if it is your own code, set PYTHONPATH to its folder"
            raise ConfigError(f"{self} cannot be built from {self.target}: {cause}{hint}") from error

    def __str__(self) -> str:
        """Returns `group=option`, as it is typed."""
        return f"{self.group}={self.option or self.group}"


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


def plain(config: Any) -> Any:
    """Converts a configuration to plain Python values, with interpolations resolved; plain values stay as they are."""
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


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


def load_yaml(path: Path) -> Any:
    """Returns the configuration in a file of YAML.

    Raises:
        OSError: see `read_file`.
        Exception: it is no such YAML; its parsers raise many types.
    """
    return copy.deepcopy(parsed_yaml(read_file(path).decode()))


@lru_cache(maxsize=8)
def parsed_yaml(text: str) -> Any:
    """Returns the configuration in a text of YAML, to be copied and not changed. Parsing takes longer than a copy."""
    return OmegaConf.create(text)
