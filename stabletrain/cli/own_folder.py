"""Gives each run and each sweep a folder of its own, also if several begin within the same second.

The default folder is named by the second. The process that creates it has it; any other one appends `-2`, `-3` ... A
folder that the user names is taken as it is: it may be one to continue in, and otherwise a run in it is refused.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stabletrain.parallel.ranks import current_ranks, run_on_main


class OwnFolder(Callback):
    """A callback of Hydra (`hydra.callbacks` in `conf/config.yaml`) that chooses the run folder, on rank 0 for all."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Replaces a folder named by the time with one that no other run has."""
        with suppress(OmegaConfBaseException):  # Hydra reports what is wrong with the name
            if named_by_time(config.hydra.run):
                folder = Path(config.hydra.run.dir)
                config.hydra.run.dir = str(run_on_main(current_ranks(), lambda: create_unique(folder)))


def named_by_time(place: DictConfig) -> bool:
    """Whether a folder is named by the time, and not by the user.

    Args:
        place: `hydra.run` or `hydra.sweep`.
    """
    written: Any = OmegaConf.to_container(place, resolve=False)
    return "${now:" in str(written["dir"])


def create_unique(folder: Path) -> Path:
    """Creates the folder, or if it exists already one with a number appended; returns its path."""
    own, number = folder, 1
    while True:
        try:
            own.mkdir(parents=True)
        except FileExistsError:
            number += 1
            own = folder.with_name(f"{folder.name}-{number}")
        except OSError:  # the run reports that it cannot write there
            return own
        else:
            return own
