"""The runs that a command line with `-m` asks for, by Hydra's own parser and sweeper, before any of them is run."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from stabletrain.arguments import Arguments
from stabletrain.mistakes import own_folders


class Grid(NamedTuple):
    """What a sweep will run.

    Attributes:
        cfg: its configuration, Hydra's part included.
        sweeper: the option of `hydra/sweeper`.
        runs: overrides of each run; None where each is chosen by how the ones before it ended, as Optuna does.
        varies: the keys that differ between the runs, in the order in which they were given.
        count: of the runs; None where that is not known beforehand.
    """

    cfg: Any
    sweeper: str
    runs: list[list[str]] | None
    varies: list[str]
    count: int | None


@contextmanager
def hydra(arguments: Arguments, config_dir: Path) -> Generator[str, None, None]:
    """Hydra, started as `train.py` starts it, for this context; gives the configuration's name."""
    values = dict(zip(arguments.options, arguments.options[1:], strict=False))
    search = create_config_search_path(str(Path(values.get("--config-path", config_dir)).resolve()))
    for folder in own_folders(arguments):
        search.prepend("command-line", f"file://{folder.resolve()}", SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    try:
        Hydra.create_main_hydra2("train", search)
        yield values.get("--config-name") or values.get("-cn") or "config"
    finally:
        GlobalHydra.instance().clear()


def grid(name: str, overrides: Sequence[str]) -> Grid:
    """The runs of a sweep; within `hydra`.

    Args:
        name: of the configuration.
        overrides: as typed.
    """
    started = GlobalHydra.instance().hydra
    assert started is not None
    cfg: Any = started.compose_config(name, ["hydra.mode=MULTIRUN", *overrides], run_mode=RunMode.MULTIRUN)
    params = [f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=started.config_loader)
    parsed = parser.parse_overrides([*params, *cfg.hydra.overrides.task])
    last = {override.get_key_element(): override for override in parsed}
    varies = [key.lstrip("+~") for key, override in last.items() if override.is_sweep_override()]
    sweeper = str(cfg.hydra.runtime.choices.get("hydra/sweeper"))
    if not str(cfg.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return Grid(cfg, sweeper, None, varies, cfg.hydra.sweeper.get("n_trials"))
    [runs] = BasicSweeper.split_arguments(parsed, None)
    return Grid(cfg, sweeper, runs, varies, len(runs))
