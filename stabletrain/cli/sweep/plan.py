"""Plans a sweep: which runs a command asks for, which of them are over, and `sweep.json`.

The runs that a command line with `-m` asks for, by Hydra's own parser and sweeper, before any of them is run.

A sweep before its first run: expanded, checked, recorded, announced.

`sweep.json`: which runs a sweep's folder is for; and which of them are over, by their own `run.json`.

A run is over when it has a result: it finished, or the guard halted it. Started again in the same folder, a sweep runs
what is not.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Generator, Mapping, Sequence
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

from stabletrain.config.arguments import Arguments, key_of, parse_arguments, recorded_arguments, with_overrides
from stabletrain.config.error_texts import own_folders
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import replace
from stabletrain.tracking.run_folder import RunFolder


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
    values |= {name: value for name, equals, value in (o.partition("=") for o in arguments.options) if equals}
    config_path = values.get("--config-path") or values.get("-cp") or config_dir
    search = create_config_search_path(str(Path(config_path).resolve()))
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


FINISHED = ("finished", "halted")
"""Statuses of a run that has a result."""

NAME = "sweep.json"


class Sweep(NamedTuple):
    """A sweep as its folder knows it.

    Attributes:
        folder: its own, above those of its runs.
        command: the command line of this start.
        runs: overrides of each run; None where they are chosen one by one.
        varies: the keys that differ between them.
        count: of the runs; None where that is not known.
        launcher: Hydra's, `basic` where one run follows the other.
        began: this start, in seconds since 1970.
    """

    folder: Path
    command: str
    runs: list[list[str]] | None
    varies: list[str]
    count: int | None
    launcher: str
    began: float

    def varied(self, overrides: Sequence[str]) -> str:
        """What of a run's overrides tells it from the others, long numbers to four digits."""
        return " ".join(shortened(override) for override in overrides if key_of(override) in self.varies)

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and `run.json` of the runs that have begun, by number."""
        files = sorted(self.folder.rglob("run.json"), key=lambda file: (len(file.parent.name), str(file.parent)))
        return [(str(file.parent.relative_to(self.folder)), RunFolder(file.parent).read()) for file in files]


def shortened(override: str) -> str:
    """`optimizer.lr=0.00443` for `optimizer.lr=0.004430375245218269`."""
    key, _, value = override.partition("=")
    try:
        return f"{key}={float(value):.4g}" if len(value) > 8 and "." in value else override
    except ValueError:
        return override


def begin(folder: Path, typed: Arguments, grid: Grid) -> Sweep:
    """Writes the record of a sweep that starts, or starts again.

    Args:
        folder: the sweep's.
        typed: its command line.
        grid: what it will run.

    Raises:
        ConfigError: the folder holds runs of another sweep, or cannot be written.
    """
    launcher = str(grid.cfg.hydra.runtime.choices.get("hydra/launcher"))
    sweep = Sweep(folder, shlex.join(sys.orig_argv), grid.runs, grid.varies, grid.count, launcher, time.time())
    for name, record in sweep.records():
        belongs(sweep, name, record)
    kept = [o for o in typed.overrides if key_of(o) not in ("resume", "hydra.sweep.dir", "hydra.output_subdir")]
    fields = sweep._asdict() | {"folder": str(folder), "options": typed.options, "overrides": kept}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / NAME, json.dumps(fields, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"hydra.sweep.dir={folder} cannot be written ({error}): fix that, or choose another hydra.sweep.dir"
        ) from error
    return sweep


def belongs(sweep: Sweep, name: str, record: Mapping[str, Any]) -> None:
    """Refuses a run that lies in the folder and is not one of the sweep's, in its place.

    Raises:
        ConfigError: says what lies there.
    """
    if sweep.runs is None or not record.get("overrides"):
        return
    its = parse_arguments([str(override) for override in record["overrides"]]).identity()
    planned = [parse_arguments(run).identity() for run in sweep.runs]
    if (its not in planned) if not name.isdecimal() else (planned[int(name) : int(name) + 1] != [its]):
        raise ConfigError(
            f"hydra.sweep.dir={sweep.folder} holds another sweep: its run {name} is {' '.join(its) or 'the default'}, "
            "which is not that run of this command: choose another hydra.sweep.dir"
        )


def read(folder: Path) -> Sweep | None:
    """The sweep of a folder; None where there is no record of one."""
    try:
        fields = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return Sweep(folder, *(fields[name] for name in Sweep._fields[1:]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def status_of(folder: Path) -> str | None:
    """The status of the run in a folder; None where there is none."""
    return RunFolder(folder).read().get("status")


def finished_run(
    folder: Path, overrides: Sequence[str], steps: int, statuses: Sequence[str] = FINISHED
) -> dict[str, Any] | None:
    """The `run.json` of the run in a folder, where these very overrides were run there and it is over.

    Args:
        folder: the run's.
        overrides: of the run that is to be there.
        steps: that it is to have; a finished run with fewer is not over.
        statuses: that count as over.
    """
    record = RunFolder(folder).read()
    if record.get("status") not in statuses or not record.get("id"):
        return None
    if recorded_arguments(folder).identity() != parse_arguments([*overrides]).identity():
        return None
    if record["status"] == "finished" and record.get("final", {}).get("steps", 0) < steps:
        return None
    return record


def refuse_another(folder: Path, overrides: Sequence[str]) -> None:
    """Refuses to go on with a run of other overrides, which a search may come to that proposes anew.

    Raises:
        ConfigError: says what lies there.
    """
    record = RunFolder(folder).read()
    its, this = recorded_arguments(folder).identity(), parse_arguments([*overrides]).identity()
    if record.get("id") and its != this:
        there, here = ([o for o in one if o not in other] for one, other in ((its, this), (this, its)))
        raise ConfigError(
            f"hydra.sweep.dir={folder.parent} holds another sweep: its run {folder.name} is {' '.join(there)}, here it "
            f"would be {' '.join(here)}: choose another hydra.sweep.dir (a search goes on only under the "
            "hydra.sweeper.sampler.seed it began with)"
        )


ANSWERS = frozenset(
    ["--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"]
)
"""Options with which Hydra answers a question and runs nothing."""


def start(typed: Arguments, config_dir: Path) -> tuple[Sweep | None, Arguments]:
    """The sweep that a command line asks for, recorded in its folder, and the command line that runs it there.

    Args:
        typed: with `resume` resolved.
        config_dir: the project's `conf/`.

    Returns:
        None in place of the sweep where the command runs none.

    Raises:
        ConfigError: the folder holds another sweep, or the launcher cannot run it.
    """
    if not typed.sweeps or ANSWERS & set(typed.options):
        return None, typed
    with hydra(typed, config_dir) as name:
        found = grid(name, typed.overrides)
        folder = Path(str(found.cfg.hydra.sweep.dir))
        check_jobs(found)
    sweep = begin(folder, typed, found)
    return sweep, with_overrides(typed, f"hydra.sweep.dir='{folder}'", "hydra.output_subdir=null")


def check_jobs(found: Grid) -> None:
    """Refuses more runs at once than there are CPU cores.

    Raises:
        ConfigError: names how many there are.
    """
    jobs = found.cfg.hydra.launcher.get("n_jobs")
    if jobs is None:
        return
    cores = len(os.sched_getaffinity(0))
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs == 0:
        raise ConfigError(f"hydra.launcher.n_jobs={jobs} is not how many runs at once: use 1 to {cores}, or -1 for all")
    if jobs > cores:
        raise ConfigError(
            f"hydra.launcher.n_jobs={jobs} is above the {cores} CPU cores here, and each run keeps one busy: "
            f"use hydra.launcher.n_jobs={cores} or fewer"
        )
