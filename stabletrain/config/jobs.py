"""Hydra in this process: composes a command line, or runs a function as the job that the command line describes.

`train.py` is started by Hydra's own decorator. A sweep's plan, `stabletrain.train` and `stabletrain whatif` need the
same without a command line of their own. Hydra's global state is the same afterwards.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from stabletrain.config.arguments import Arguments
from stabletrain.config.error_texts import explain, own_folders
from stabletrain.errors import ConfigError


@contextmanager
def hydra(arguments: Arguments, config_dir: Path) -> Generator[str, None, None]:
    """Context in which Hydra is initialized as `train.py` initializes it; yields the configuration's name."""
    values = dict(zip(arguments.options, arguments.options[1:], strict=False))
    values |= {name: value for name, equals, value in (o.partition("=") for o in arguments.options) if equals}
    config_path = values.get("--config-path") or values.get("-cp") or config_dir
    search = create_config_search_path(os.path.realpath(config_path))
    for folder in own_folders(arguments):
        search.prepend("command-line", f"file://{os.path.realpath(folder)}", SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    try:
        Hydra.create_main_hydra2("train", search)
        yield values.get("--config-name") or values.get("-cn") or "config"
    finally:
        GlobalHydra.instance().clear()


def run_as_job(arguments: Arguments, config_dir: Path, job: Callable[[DictConfig, Path], None]) -> Path:
    """Runs a function as a job of Hydra, and returns the run folder.

    Args:
        arguments: with `resume` resolved.
        config_dir: the folder of the config groups.
        job: takes the composed configuration and the run folder.

    Raises:
        ConfigError: the configuration cannot be composed.
        Exception: what `job` raised.
    """
    errors: list[Exception] = []
    folders: list[Path] = []

    def kept(cfg: DictConfig) -> None:
        folders.append(Path(HydraConfig.get().runtime.output_dir))
        try:
            job(cfg, folders[0])
        except Exception as error:  # kept from Hydra, which would print it
            errors.append(error)

    with explained(arguments, config_dir), hydra(arguments, config_dir) as name:
        started = GlobalHydra.instance().hydra
        assert started is not None
        started.run(name, kept, arguments.overrides, with_log_configuration=False)
    if errors:
        raise errors[0]
    return folders[0]


@contextmanager
def composed(arguments: Arguments, config_dir: Path) -> Generator[tuple[DictConfig, dict[str, str]], None, None]:
    """Context with Hydra's globals as inside a job; writes nothing.

    Yields:
        the configuration of a command line, and the option of each config group.

    Raises:
        ConfigError: the configuration cannot be composed.
    """
    before = HydraConfig.instance().cfg
    try:
        with explained(arguments, config_dir), hydra(arguments, config_dir) as name:
            cfg = compose(name, arguments.overrides, return_hydra_config=True)
            HydraConfig.instance().set_config(cfg)
            with open_dict(cfg):
                del cfg["hydra"]
            yield cfg, {group: str(option) for group, option in HydraConfig.get().runtime.choices.items()}
    finally:
        HydraConfig.instance().cfg = before


@contextmanager
def explained(arguments: Arguments, config_dir: Path) -> Generator[None, None, None]:
    """Context that turns Hydra's errors into a ConfigError, and restores the Hydra of a program that uses it itself."""
    before = GlobalHydra.instance().hydra
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if (message := explain(error, config_dir, arguments)) is None:
            raise
        raise ConfigError(message) from error
    finally:
        GlobalHydra.instance().hydra = before
