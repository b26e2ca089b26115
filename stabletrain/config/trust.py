"""What a recorded file may name, so that a run folder that came from elsewhere runs none of its own code.

A run's record names classes (`_target_`), configuration folders and settings of Hydra; an incident of `Guard` names a
module. From a record, only this is used: the targets of this package's `conf/`, optimizers of torch.optim, modules of
torch.nn, models of torchvision.models. Everything else that this user's own runs record is remembered in the user's
state directory, as an empty file whose name is the hash of the record; `--trust` remembers a folder from elsewhere.
"""

import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from stabletrain.config.moved import now, updated
from stabletrain.program import conf_folder
from stabletrain.stored.trusted import check_trusted, remember

HARMLESS_SETTINGS = frozenset({"hydra/launcher", "hydra/sweeper"})
"""Settings of Hydra that choose an installed launcher or sweeper; the others run code, or name folders to write."""

PLAIN_INTERPOLATION = re.compile(r"\$\{[\w.]+\}|\$\{oc\.env:[\w, ./-]*\}")
"""Interpolations that give the value of another key, or of an environment variable."""


def remember_config(tree: Any) -> None:
    """Trusts a configuration of this user's, if it names anything that is not known anyway."""
    resolved, raw = resolved_and_raw(tree)
    if foreign_target(resolved):
        remember(raw)


def remember_arguments(options: Sequence[str], overrides: Sequence[str]) -> None:
    """Trusts a command line of this user's, if it names anything that is not known anyway."""
    if foreign_argument(options, overrides):
        remember([[*options], [*overrides]])


def check_config(tree: Any, file: Path) -> None:
    """Checks a recorded configuration; see `check_trusted`.

    Args:
        tree: an OmegaConf container, or plain values.
        file: that holds it.
    """
    resolved, raw = resolved_and_raw(tree)
    check_trusted(raw, foreign_target(resolved), file)


def resolved_and_raw(tree: Any) -> tuple[Any, Any]:
    """Returns the plain values of a configuration, with its interpolations resolved and as they are written."""
    if not isinstance(tree, DictConfig):
        return tree, tree
    return OmegaConf.to_container(tree, resolve=True), OmegaConf.to_container(tree, resolve=False)


def check_arguments(options: Sequence[str], overrides: Sequence[str], file: Path) -> None:
    """Checks a recorded command line; see `check_trusted`."""
    check_trusted([[*options], [*overrides]], foreign_argument(options, overrides), file)


def foreign_target(tree: Any) -> str:
    """Returns the first `_target_` of a configuration that is neither in this package's `conf/` nor PyTorch's.

    A text that still holds an interpolation counts too: it is resolved when it is built, perhaps to a `_target_`.

    Args:
        tree: plain values, resolved.
    """
    targets = [node["_target_"] for node in nodes(updated(tree)) if isinstance(node, dict) and "_target_" in node]
    unknown = (f"_target_={target}" for target in targets if not is_known(target))
    return next(chain(unknown, (text for text in nodes(tree) if isinstance(text, str) and "${" in text)), "")


def nodes(tree: Any) -> Iterator[Any]:
    """Yields a configuration and everything in it, however deep, keys included."""
    yield tree
    inside = chain(*tree.items()) if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    for each in inside:
        yield from nodes(each)


def is_known(target: Any) -> bool:
    """Returns whether a target is in this package's `conf/`, or is an optimizer, a module or a model of PyTorch."""
    if not isinstance(target, str):
        return False
    return now(target) in own_targets() or is_of_torch(target)  # what has moved may have moved again


@cache
def own_targets() -> frozenset[str]:
    """Returns every target in the files of this package's `conf/`."""
    texts = (file.read_text(encoding="utf-8") for file in conf_folder().rglob("*.yaml"))
    return frozenset(target for text in texts for target in re.findall(r"^\s*_target_:\s*([\w.]+)\s*$", text, re.M))


def is_of_torch(target: str) -> bool:
    """Returns whether a target is an optimizer of torch.optim, a module of torch.nn or a model of torchvision.models.

    A name that another module's object has there, such as `torch.nn.modules.module.os.system`, is none of these.
    """
    module, _, name = target.rpartition(".")
    if module in ("torch.optim", "torch.nn"):
        package: Any = import_module(module)
        base = import_module("torch.optim").Optimizer if module == "torch.optim" else import_module("torch.nn").Module
        found = vars(package).get(name)
        return isinstance(found, type) and issubclass(found, base)
    if module == "torchvision.models":
        return name in import_module(module).list_models(module=import_module(module))
    return False


def foreign_argument(options: Sequence[str], overrides: Sequence[str]) -> str:
    """Returns the first word of a recorded command that could run code which is not this package's; empty if none."""
    if options:  # such as a folder of configurations, or a pickled one
        return " ".join(options)
    return next((override for override in overrides if is_foreign(override)), "")


def is_foreign(override: str) -> bool:
    """Returns whether an override sets a target that is not known, or a setting of Hydra that could name one.

    An option of a group that is a path counts too: Hydra would read a file outside the folder of the group.
    """
    if "${" in PLAIN_INTERPOLATION.sub("", override):  # such as oc.decode, which makes a dict of a text
        return True
    try:
        [parsed] = OverridesParser.create().parse_overrides([override])
    except HydraException:
        return True
    key = parsed.key_or_group
    if key.startswith(("hydra.", "hydra/")) or key == "hydra":
        return key not in HARMLESS_SETTINGS or "/" in override.partition("=")[2]
    if ("/" in key or os.path.isdir(conf_folder() / key)) and "/" in override.partition("=")[2]:
        return True
    if parsed.is_sweep_override():
        return "_target_" in override
    value = parsed.value()
    return bool(foreign_target({"_target_": value} if key.rpartition(".")[2] == "_target_" else value))
