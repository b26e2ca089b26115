"""Gives each run and each sweep a folder of its own, also if several begin within the same second.

The default folder is named by the second. The process that creates it has it; any other one appends `-2`, `-3` ... A
folder that the user names is taken as it is: it may be one to continue in, and otherwise a run in it is refused.
"""

import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stabletrain.parallel.ranks import current_ranks, run_on_main
from stabletrain.stored.json_files import DamagedFile
from stabletrain.stored.run_files import read_run_record


class OwnFolder(Callback):
    """A callback of Hydra (`hydra.callbacks` in `conf/config.yaml`) that chooses the run folder, on rank 0 for all."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Replaces a folder named by the time with one that no other run has."""
        with suppress(OmegaConfBaseException):  # Hydra reports what is wrong with the name
            folder = Path(config.hydra.run.dir)
            if named_by_time(config.hydra.run):
                config.hydra.run.dir = str(run_on_main(current_ranks(), lambda: create_unique(folder)))
            elif holds_run(folder):  # a run is refused there, and must not overwrite the options of the earlier one
                config.hydra.output_subdir = None


def named_by_time(place: DictConfig) -> bool:
    """Whether a folder is named by the time, and not by the user.

    Args:
        place: `hydra.run` or `hydra.sweep`.
    """
    written: Any = OmegaConf.to_container(place, resolve=False)
    return "${now:" in str(written["dir"])


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder: its record has an id, which that of a refused one has not."""
    try:
        return read_run_record(folder).get("id") is not None
    except (OSError, DamagedFile):
        return False


def create_unique(folder: Path) -> Path:
    """Creates the folder, or if it exists already one with a number appended; returns its path."""
    while True:
        own = unused(folder)
        try:
            own.mkdir(parents=True)
        except FileExistsError:  # another process has just taken it
            continue
        except OSError:  # the run reports that it cannot write there
            return own
        return own


def unused(folder: Path) -> Path:
    """Returns the folder, or if it exists already the first of `<folder>-2`, `<folder>-3` ... that does not."""
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))
