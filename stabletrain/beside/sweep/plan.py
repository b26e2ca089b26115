"""Plans a sweep: expands the command into runs, finds the runs that are done, and records the sweep in `sweep.json`.

Hydra's own parser and sweeper expand the command line, before any run starts. A run is done if it has a result: it
finished, or the guard halted it. Starting a sweep again in the same folder runs only the others.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from stabletrain.cli.own_folder import create_unique, named_by_time
from stabletrain.config import trust
from stabletrain.config.arguments import (
    INFORMATION_OPTIONS,
    SWEEP,
    Arguments,
    key_of,
    parse_arguments,
    quoted,
    recorded_arguments,
    with_overrides,
)
from stabletrain.config.jobs import hydra
from stabletrain.config.resuming import check_resume, settings
from stabletrain.errors import ConfigError
from stabletrain.program import started
from stabletrain.stored.json_files import DamagedFile
from stabletrain.stored.run_files import read_sweep_record
from stabletrain.tracking.metrics import replace
from stabletrain.tracking.run_folder import RunFolder


class Grid(NamedTuple):
    """The runs that a sweep consists of.

    Attributes:
        cfg: the composed configuration, with Hydra's own part.
        sweeper: the option of `hydra/sweeper`.
        runs: overrides of each run; None if a sweeper such as Optuna chooses each run from earlier results.
        varies: the keys that differ between runs, in the order typed.
        count: number of runs; None if it is not known in advance.
    """

    cfg: Any
    sweeper: str
    runs: list[list[str]] | None
    varies: list[str]
    count: int | None


def grid(name: str, overrides: Sequence[str]) -> Grid:
    """Expands a command line into a sweep's runs. Call it inside `hydra`.

    Args:
        name: the configuration's name.
        overrides: as typed.
    """
    started = GlobalHydra.instance().hydra
    assert started is not None
    cfg: Any = started.compose_config(name, ["hydra.mode=MULTIRUN", *overrides], run_mode=RunMode.MULTIRUN)
    params = [f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items()]
    typed: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    parser = OverridesParser.create(config_loader=started.config_loader)
    parsed = parser.parse_overrides([*params, *typed])
    # If a key is given several times, Hydra takes the last one.
    last = {override.get_key_element(): override for override in parsed}
    varies = [key.lstrip("+~") for key, override in last.items() if override.is_sweep_override()]
    sweeper = str(cfg.hydra.runtime.choices.get("hydra/sweeper"))
    if not str(cfg.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return Grid(cfg, sweeper, None, varies, cfg.hydra.sweeper.get("n_trials"))
    [runs] = BasicSweeper.split_arguments(parsed, None)
    return Grid(cfg, sweeper, runs, varies, len(runs))


def resumed_by_name() -> bool:
    """Whether the user named the folder to resume, so that what was typed beside it changes the runs in it."""
    return parse_arguments(started().typed).value("resume") not in (None, "", "none", "auto")


RECORD_NAME = "sweep.json"


class Sweep(NamedTuple):
    """A sweep as `sweep.json` records it.

    Attributes:
        folder: the sweep's folder, which contains the run folders.
        command: the command line of this start.
        runs: overrides of each run; None if the sweeper chooses them one by one.
        varies: the keys that differ between runs.
        count: number of runs; None if it is not known.
        launcher: Hydra's launcher; `basic` runs one at a time.
        began: time of this start, in seconds since 1970.
    """

    folder: Path
    command: str
    runs: list[list[str]] | None
    varies: list[str]
    count: int | None
    launcher: str
    began: float

    def varied(self, overrides: Sequence[str]) -> str:
        """Returns the run's overrides of keys that vary, with long numbers rounded to four significant digits."""
        return " ".join(shortened(override) for override in overrides if key_of(override) in self.varies)

    def swept(self, overrides: Sequence[str]) -> list[str]:
        """Returns those of the overrides whose keys vary."""
        return [override for override in overrides if key_of(override) in self.varies]

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns the folder name and `run.json` of each run that has started, in the order of their numbers.

        The status of a run whose `run.json` is damaged is `broken`.
        """
        files = sorted(self.record_files(), key=lambda file: (len(file.parent.name), str(file.parent)))
        return [
            (str(file.parent.relative_to(self.folder)), {"status": "broken", **RunFolder(file.parent).read()})
            for file in files
        ]

    def record_files(self) -> list[Path]:
        """Returns `run.json` of each run that has started, but not those of arms that a what-if has started in one."""
        found = {*self.folder.rglob("run.json")}
        return [file for file in found if not any(place / "run.json" in found for place in file.parent.parents)]


def shortened(override: str) -> str:
    """Rounds a long number: `optimizer.lr=0.00443` for `optimizer.lr=0.004430375245218269`."""
    key, _, value = override.partition("=")
    try:
        return f"{key}={float(value):.4g}" if len(value) > 8 and "." in value else override
    except ValueError:
        return override


def record_sweep(folder: Path, typed: Arguments, grid: Grid) -> Sweep:
    """Writes `sweep.json` for a sweep that starts or restarts.

    Args:
        folder: the sweep's folder.
        typed: its command line.
        grid: its runs.

    Raises:
        ConfigError: the folder holds runs of another sweep, or cannot be written.
    """
    launcher = str(grid.cfg.hydra.runtime.choices.get("hydra/launcher"))
    sweep = Sweep(folder, started().command, grid.runs, grid.varies, grid.count, launcher, time.time())
    # Check every run before writing anything: `sweep.json` of another sweep must not be overwritten.
    for name, record in sweep.records():
        check_belongs(sweep, name, record)
    # The record leaves out what names the folder; continuing a sweep sets it anew.
    kept = [o for o in typed.overrides if key_of(o) not in ("resume", "hydra.sweep.dir", "hydra.output_subdir")]
    fields = sweep._asdict() | {"folder": str(folder), "options": typed.options, "overrides": kept}
    trust.remember_arguments([option for option in typed.options if option not in SWEEP], kept)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / RECORD_NAME, json.dumps(fields, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"hydra.sweep.dir={folder} cannot be written ({error}): make it writable, or choose another hydra.sweep.dir"
        ) from error
    return sweep


def check_belongs(sweep: Sweep, name: str, record: Mapping[str, Any]) -> None:
    """Checks that a run found in the sweep's folder is the one planned for that place.

    Raises:
        ConfigError: it is another run.
    """
    if sweep.runs is None or not record.get("overrides"):
        return
    its = parse_arguments([str(override) for override in record["overrides"]]).identity()
    planned = [parse_arguments(run).identity() for run in sweep.runs]
    if resumed_by_name():  # what was typed beside `resume` changes the runs; the keys that vary tell them apart
        its, planned = sweep.swept(its), [sweep.swept(run) for run in planned]
    # A numbered folder must hold the run of that number; a folder with another name, any run of the sweep.
    if (its not in planned) if not name.isdecimal() else (planned[int(name) : int(name) + 1] != [its]):
        raise ConfigError(
            f"hydra.sweep.dir={sweep.folder} holds another sweep: its run {name} is {' '.join(its) or 'the default'}, "
            "which is not that run of this command: choose another hydra.sweep.dir"
        )


def read(folder: Path) -> Sweep | None:
    """Returns the sweep recorded in a folder; None if there is no valid record."""
    try:
        fields: Any = read_sweep_record(folder)
    except DamagedFile:
        return None
    return Sweep(folder, *(fields[name] for name in Sweep._fields[1:]))


def status_of(folder: Path) -> str | None:
    """Returns the status of the run in a folder; None if there is no run."""
    return RunFolder(folder).read().get("status")


def check_same_run(folder: Path, overrides: Sequence[str], sweep: Sweep | None = None) -> None:
    """Checks that the folder does not hold a run with other overrides; if it is resumed by name, of keys that vary.

    A search restarted with another sampler seed proposes other overrides for the same run number.

    Raises:
        ConfigError: the folder holds a run with other overrides.
    """
    record = RunFolder(folder).read()
    its, this = recorded_arguments(folder).identity(), parse_arguments([*overrides]).identity()
    if sweep is not None and resumed_by_name():
        its, this = sweep.swept(its), sweep.swept(this)
    if record.get("id") and its != this:
        there, here = ([o for o in one if o not in other] for one, other in ((its, this), (this, its)))
        raise ConfigError(
            f"hydra.sweep.dir={folder.parent} holds another sweep: its run {folder.name} is {' '.join(there)}, here it "
            f"would be {' '.join(here)}: choose another hydra.sweep.dir (a search goes on only under the "
            "hydra.sweeper.sampler.seed it began with)"
        )


def start_sweep(typed: Arguments, config_dir: Path) -> tuple[Sweep | None, Arguments]:
    """Records the sweep that a command line asks for.

    Args:
        typed: the command line, with `resume` resolved.
        config_dir: the project's `conf/`.

    Returns:
        The sweep, or None if the command runs none; and the command line that runs it in its folder.

    Raises:
        ConfigError: the folder holds another sweep, or the launcher's settings are invalid.
    """
    if not typed.sweeps or INFORMATION_OPTIONS & set(typed.options):
        return None, typed
    with hydra(typed, config_dir) as name:
        found = grid(name, typed.overrides)
        folder = Path(str(found.cfg.hydra.sweep.dir))
        check_jobs(found)
        check_changes(name, folder, found)
    if named_by_time(found.cfg.hydra.sweep):
        folder = create_unique(folder)
    sweep = record_sweep(folder, typed, found)
    return sweep, with_overrides(typed, f"hydra.sweep.dir={quoted(folder)}", "hydra.output_subdir=null")


def check_changes(name: str, folder: Path, found: Grid) -> None:
    """Checks the settings that a resume by name changes in each run of a sweep that has begun; call it inside `hydra`.

    Raises:
        ConfigError: a resume cannot change one of them (`config/resuming.py`).
    """
    if not resumed_by_name():
        return
    for number, run in enumerate(found.runs or ()):
        place = folder / str(number)
        if recorded_arguments(place).identity() not in ([], parse_arguments(run).identity()):
            cfg: Any = compose(name, [*run, "resume=auto"], return_hydra_config=True)
            choices = dict(cfg.hydra.runtime.choices)
            with open_dict(cfg):
                del cfg["hydra"]
            check_resume(cfg.resume, settings(cfg, choices), place, unfinished=False)


def check_jobs(found: Grid) -> None:
    """Checks that no more runs execute in parallel than there are CPU cores.

    Raises:
        ConfigError: `n_jobs` is invalid or above the number of cores.
    """
    jobs = found.cfg.hydra.launcher.get("n_jobs")
    if jobs is None:
        return
    cores = len(os.sched_getaffinity(0))
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs == 0:
        raise ConfigError(f"hydra.launcher.n_jobs={jobs} is not a number of runs: use 1 to {cores}, or -1 for all")
    if jobs > cores:
        raise ConfigError(
            f"hydra.launcher.n_jobs={jobs} is above the {cores} CPU cores here, and each run keeps one busy: "
            f"use hydra.launcher.n_jobs={cores} or fewer"
        )
