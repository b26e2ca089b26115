"""Composes the same options once per process, because Hydra takes longer for it than the steps of a small run.

What is kept is each YAML text as parsed, and the result of reading and merging the files for each choice of options.
Values that are typed for single keys are applied by Hydra each time, with all that follows. Commands that are started
as processes compose as they do for users.
"""

import copy
import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.defaults_list import Overrides, create_defaults_list
from omegaconf import OmegaConf

merge = config_loader_impl.ConfigLoaderImpl._compose_config_from_defaults_list
load = OmegaConf.load


def remember(patch: pytest.MonkeyPatch) -> None:
    """Has Hydra keep, in this process, what it read and merged."""
    parsed, lists, merged = {}, {}, {}

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
        files = [(str(source), stamps(source)) for source in repo.get_sources()]
        given = (config_name, *(each.input_line for each in choices), *files, *how.items())
        if given not in lists:
            lists[given] = create_defaults_list(repo, config_name, choices, **how)
        return replace(lists[given], config_overrides=values)

    def merged_once(loader: Any, defaults: Any, repo: Any) -> Any:
        """Stands for `_compose_config_from_defaults_list`; `defaults` is one of the lists that are kept."""
        if id(defaults) not in merged:
            merged[id(defaults)] = pickle.dumps(merge(loader, defaults, repo))
        return pickle.loads(merged[id(defaults)])

    def share(repo: Any, delegate: Any) -> None:
        """Stands for a deep copy of all sources: `initialize_sources` replaces their list, and does not change it."""
        repo.delegate, repo.cache = copy.copy(delegate), {}

    patch.setattr(OmegaConf, "load", staticmethod(load_once))
    patch.setattr(config_loader_impl.CachingConfigRepository, "__init__", share)
    patch.setattr(config_loader_impl, "create_defaults_list", defaults_once)
    patch.setattr(config_loader_impl.ConfigLoaderImpl, "_compose_config_from_defaults_list", merged_once)


def stamps(source: Any) -> tuple:
    """Returns name, size and time of each YAML file of a source: a test may change its own options."""
    files = sorted(Path(source.path).rglob("*.yaml")) if source.scheme() == "file" else []
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
