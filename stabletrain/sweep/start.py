"""A sweep before its first run: expanded, checked, recorded, announced."""

import os
from pathlib import Path

from stabletrain.arguments import Arguments, added
from stabletrain.errors import ConfigError
from stabletrain.sweep.grid import Grid, grid, hydra
from stabletrain.sweep.record import Sweep, begin

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
    return sweep, added(typed, f"hydra.sweep.dir='{folder}'", "hydra.output_subdir=null")


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
