"""Composes the same options once, because Hydra takes longer for it than the steps of a small run.

What is kept is each YAML text as parsed, the result of reading and merging the files for each choice of options, and
the defaults of every key for it, with which a configuration is checked. Values that are typed for single keys are
applied by Hydra each time, with all that follows. Commands that are forked share what they keep, in a folder; those
that are started as fresh processes compose as they do for users.
"""

import copy
import hashlib
import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.defaults_list import Overrides, create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

FOLDER = "STABLETRAIN_TESTS_COMPOSED"
"""Variable with the folder in which the processes of one session of tests keep what they composed."""

merge = config_loader_impl.ConfigLoaderImpl._compose_config_from_defaults_list
load = OmegaConf.load
map_choices = defaults_list._create_interpolation_map


class Kept:
    """What has been computed, by what it was computed from.

    Args:
        folder: an existing one, that processes share; None to keep in this process alone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._pickles = folder, {}

    def get(self, given: tuple, compute: Callable[[], Any]) -> Any:
        """Returns a copy of the result."""
        name = hashlib.sha256(repr(given).encode()).hexdigest()
        if name not in self._pickles:
            self._pickles[name] = self._shared(name, compute)
        return pickle.loads(self._pickles[name])

    def _shared(self, name: str, compute: Callable[[], Any]) -> bytes:
        if self._folder is None:
            return pickle.dumps(compute())
        file = self._folder / name
        if not file.exists():
            written = file.with_suffix(f".{os.getpid()}")
            written.write_bytes(pickle.dumps(compute()))
            written.replace(file)  # whole, or not at all: others read, and any process may be killed
        return file.read_bytes()


def remember(patch: pytest.MonkeyPatch, folder: Path | None = None) -> None:
    """Has Hydra keep what it read and merged: in this process, and in a folder that others share.

    Args:
        patch: takes it back.
        folder: an existing one.
    """
    from stabletrain.config import arguments, composed  # not before `--types` has its checks in place

    kept, parsed, lists, sources = Kept(folder), {}, {}, {}
    compute_defaults = composed.defaults

    def load_once(file: Any) -> Any:
        """Stands for `OmegaConf.load`; Hydra gives it open files."""
        if not isinstance(file, io.TextIOBase):
            return load(file)
        text = file.read()
        if text not in parsed:
            file.seek(0)  # and not the text: an error names the file
            parsed[text] = pickle.dumps(load(file))
        return pickle.loads(parsed[text])

    def defaults_once(repo: Any, config_name: Any, overrides_list: Any, **how: bool) -> Any:
        """Stands for `create_defaults_list`."""
        values = Overrides(repo, overrides_list).config_overrides
        choices = [each for each in overrides_list if not any(each is value for value in values)]
        given = (config_name, *(each.input_line for each in choices), *files(repo), *how.items())
        if given not in lists:
            lists[given] = kept.get(("list", given), lambda: create_defaults_list(repo, config_name, choices, **how))
            sources[id(lists[given].defaults)] = given
        return replace(lists[given], config_overrides=values)

    def merged_once(loader: Any, defaults: Any, repo: Any) -> Any:
        """Stands for `_compose_config_from_defaults_list`; `defaults` is one of the lists that are kept."""
        return kept.get(("merged", sources[id(defaults)]), lambda: merge(loader, defaults, repo))

    def choices_if_named(overrides: Overrides, defaults: list, *how: bool) -> Any:
        """Stands for `_create_interpolation_map`, whose choices matter only where a default names one as `${...}`."""
        named = any(default.is_interpolation() for default in defaults if not default.is_self())
        return map_choices(overrides, defaults, *how) if named else None

    @wraps(compute_defaults)
    def computed_once() -> dict[str, Any]:
        """Stands for `stabletrain.config.composed.defaults`."""
        if arguments.job_overrides("hydra"):  # one of them may say where options lie
            return compute_defaults()
        hydra = HydraConfig.get()
        loader: Any = GlobalHydra.instance().config_loader()
        chosen = [each for each in arguments.job_overrides() if arguments.key_of(each) in hydra.runtime.choices]
        given = (hydra.job.config_name, *chosen, *files(loader.repository))
        return kept.get(("defaults", given), compute_defaults)

    def share(repo: Any, delegate: Any) -> None:
        """Stands for a deep copy of all sources: `initialize_sources` replaces their list, and does not change it."""
        repo.delegate, repo.cache = copy.copy(delegate), {}

    patch.setattr(defaults_list, "_create_interpolation_map", choices_if_named)
    patch.setattr(OmegaConf, "load", staticmethod(load_once))
    patch.setattr(config_loader_impl.CachingConfigRepository, "__init__", share)
    patch.setattr(config_loader_impl, "create_defaults_list", defaults_once)
    patch.setattr(composed, "defaults", computed_once)
    patch.setattr(config_loader_impl.ConfigLoaderImpl, "_compose_config_from_defaults_list", merged_once)


def files(repo: Any) -> list[tuple]:
    """Returns the sources of a repository with the stamps of their files."""
    return [(str(source), stamps(source)) for source in repo.get_sources()]


def stamps(source: Any) -> tuple:
    """Returns name, size and time of each YAML file of a source: a test may change its own options."""
    files = sorted(Path(source.path).rglob("*.yaml")) if source.scheme() == "file" else []
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
