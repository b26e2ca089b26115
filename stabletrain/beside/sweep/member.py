"""One run of a sweep: whether it is done already, its progress display, and the line printed when it ends.

Runs may share a sweep in parallel, each in its own process. Those processes share only the sweep's folder, so a request
to stop is a file in it: every running process then saves a checkpoint, and no further run starts.
"""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from stabletrain.beside.sweep import lines, plan
from stabletrain.cli.finished import finished_run
from stabletrain.config.arguments import job_overrides
from stabletrain.machine.signals import handling
from stabletrain.printable import say
from stabletrain.tracking.metrics import replace
from stabletrain.tracking.progress import InSweep
from stabletrain.tracking.run_folder import RunFolder

POLL_S = 0.5
"""Seconds between two checks for the request to stop."""


@contextmanager
def stopping_all(folder: Path) -> Generator[None]:
    """Context for the whole sweep, in the process that started it: a signal asks all runs to save and stop.

    A second SIGINT raises KeyboardInterrupt: the runs end without saving.
    """
    stop, asked = stop_file(folder), []

    def note(number: int, frame: FrameType | None) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        stop.touch()

    stop.unlink(missing_ok=True)
    try:
        with handling(note):
            yield
    finally:
        stop.unlink(missing_ok=True)


@contextmanager
def stopped_with_others(folder: Path) -> Generator[None]:
    """Context for one run in its own process: turns a request to stop the sweep into SIGTERM for this process.

    Ignores signals from outside until the run installs its own handlers; they are for the process that started the
    sweep.
    """
    stop, over = stop_file(folder), threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            if stop.exists():  # sent repeatedly: the run may not have installed its handlers yet
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch, daemon=True)
    with handling(signal.SIG_IGN):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def stop_file(folder: Path) -> Path:
    """Returns the path of the file whose existence asks all runs to stop."""
    return folder / ".stop"


class Member:
    """The run that the current Hydra job executes.

    Attributes:
        folder: the run folder.
        number: the run's index in the sweep, from 0.
        overrides: the run's overrides.
        searching: whether a search such as Optuna's chose the overrides from earlier results.
        alone: whether runs execute one at a time.
        sweep: the run's sweep; None if there is no record of one.
    """

    def __init__(self) -> None:
        """Reads the current Hydra job's configuration. Call it inside a Hydra job only."""
        hydra = HydraConfig.get()
        self.folder, self._above = Path(hydra.runtime.output_dir), Path(hydra.sweep.dir)
        self.number = int(hydra.job.num)
        self.overrides = job_overrides()
        self.alone = hydra.runtime.choices.get("hydra/launcher") == "basic"
        self.in_search = hydra.runtime.choices.get("hydra/sweeper") != "basic"
        self.sweep = plan.read(self._above)
        self._started = time.monotonic()
        if self.sweep is not None and not self.alone:
            # The launcher started this process with a command line of its own; record the one that the user typed.
            sys.orig_argv[:] = shlex.split(self.sweep.command)

    def finished_record(self, steps: int) -> dict[str, Any] | None:
        """Returns the run's `run.json` if an earlier start of the sweep completed it, else None.

        Args:
            steps: number of steps that the run must have.

        Raises:
            ConfigError: the folder holds a run with other overrides.
        """
        plan.check_same_run(self.folder, self.overrides, self.sweep)
        return finished_run(self.folder, self.overrides, steps, changed=plan.resumed_by_name())

    def listening(self) -> AbstractContextManager[Any]:
        """Returns a context in which this run learns of a request to stop the sweep."""
        return nullcontext() if self.alone else stopped_with_others(self._above)

    @property
    def is_cancelled(self) -> bool:
        """Whether the sweep was asked to stop before this run started."""
        return not self.alone and stop_file(self._above).exists()

    def record(self) -> dict[str, Any]:
        """Returns the run's `run.json`; empty if there is none."""
        return RunFolder(self.folder).read()

    def write_hydra_record(self, cfg: DictConfig) -> None:
        """Writes `.hydra/` as Hydra would, but only at the run's first start."""
        # A resumed run keeps the configuration it started with, even if `conf/` has changed since.
        if (self.folder / "run.json").exists():
            return
        (self.folder / ".hydra").mkdir(parents=True, exist_ok=True)
        hydra = HydraConfig.instance().cfg
        whole = {"config": cfg, "hydra": hydra, "overrides": OmegaConf.create(self.overrides)}
        for name, part in whole.items():
            if part is not None:
                replace(self.folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(part))

    def progress(self, log_every: int) -> InSweep:
        """Returns the progress display."""
        label = lines.label(self.sweep, self.number, self.overrides)
        return InSweep(log_every, self.folder, label[: lines.OVERRIDES_WIDTH] + "  ", self.alone)

    def print_end(self, ended: Mapping[str, Any], *, before: bool = False) -> None:
        """Prints the line of a run that has ended.

        Args:
            ended: its `run.json`.
            before: the run ended before this start of the sweep.
        """
        seconds = None if before else time.monotonic() - self._started
        with suppress(OSError):  # the pipe's reader has exited
            say(lines.ending(self.sweep, self.number, self.overrides, ended, seconds), flush=True)
