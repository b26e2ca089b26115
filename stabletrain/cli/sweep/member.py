"""One run within its sweep, alone or beside others in processes of their own.

Several runs of a sweep at once, in processes of their own: asked to stop, all of them save and no other begins.

The processes know each other by the sweep's folder only, so the request to stop is a file in it.

One run in its sweep: whether it is over already, what it shows, and its line at the end.
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

from stabletrain.cli.sweep import lines, plan
from stabletrain.machine.signals import handling
from stabletrain.tracking.progress import InSweep
from stabletrain.tracking.run_folder import RunFolder

LOOK = 0.5
"""Seconds between two looks for the request to stop."""


@contextmanager
def stopping_all(folder: Path) -> Generator[None]:
    """A context around a whole sweep, in the process that started it: a signal asks all its runs to stop.

    A second SIGINT interrupts at once, and ends the runs where they are.
    """
    stop, asked = stop_file(folder), []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
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
    """A context around one run, in its own process: a request to stop all becomes the signal that a run answers.

    Signals from outside are left to the process that started the sweep, until the run handles them itself.
    """
    stop, over = stop_file(folder), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK):
            if stop.exists():  # again and again, because the run may not handle signals yet
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
    """The file that says that a sweep is to stop."""
    return folder / ".stop"


class Member:
    """The run of the Hydra job that this is.

    Attributes:
        folder: its own.
        number: in the sweep, from 0.
        overrides: its own.
        searching: whether it was chosen by how others ended.
        alone: whether no other runs at the same time.
        sweep: it belongs to; None where nothing is recorded of it.
    """

    def __init__(self) -> None:
        """Must be called inside a Hydra job."""
        hydra = HydraConfig.get()
        self.folder, self._above = Path(hydra.runtime.output_dir), Path(hydra.sweep.dir)
        self.number = int(hydra.job.num)
        self.overrides = [str(override) for override in hydra.overrides.task]
        self.alone = hydra.runtime.choices.get("hydra/launcher") == "basic"
        self.searching = hydra.runtime.choices.get("hydra/sweeper") != "basic"
        self.sweep = plan.read(self._above)
        self._started = time.monotonic()
        if self.sweep is not None and not self.alone:
            sys.orig_argv[:] = shlex.split(self.sweep.command)  # what was typed is not how this process was started

    def over(self, steps: int) -> dict[str, Any] | None:
        """Its `run.json`, if it has its result from an earlier start.

        Args:
            steps: that it is to have.

        Raises:
            ConfigError: its folder holds a run of other overrides.
        """
        plan.refuse_another(self.folder, self.overrides)
        return plan.finished_run(self.folder, self.overrides, steps)

    def listening(self) -> AbstractContextManager[Any]:
        """A context in which it learns that the sweep is to stop."""
        return nullcontext() if self.alone else stopped_with_others(self._above)

    @property
    def unwanted(self) -> bool:
        """Whether the sweep is to stop before this run has begun."""
        return not self.alone and stop_file(self._above).exists()

    def record(self) -> dict[str, Any]:
        """Its `run.json`; empty where there is none."""
        return RunFolder(self.folder).read()

    def keep(self, cfg: DictConfig) -> None:
        """Writes `.hydra/` as Hydra would, but at the first start only: what a run was is not what it would be now."""
        if (self.folder / "run.json").exists():
            return
        (self.folder / ".hydra").mkdir(parents=True, exist_ok=True)
        hydra = HydraConfig.instance().cfg
        whole = {"config": cfg, "hydra": hydra, "overrides": OmegaConf.create(self.overrides)}
        for name, part in whole.items():
            if part is not None:
                (self.folder / ".hydra" / f"{name}.yaml").write_text(OmegaConf.to_yaml(part), encoding="utf-8")

    def progress(self, log_every: int) -> InSweep:
        """What it shows while it runs."""
        label = lines.label(self.sweep, self.number, self.overrides)
        return InSweep(log_every, self.folder, label[: lines.WIDEST] + "  ", self.alone)

    def say(self, ended: Mapping[str, Any], *, before: bool = False) -> None:
        """Prints its line.

        Args:
            ended: its `run.json`.
            before: it ended in an earlier start.
        """
        seconds = None if before else time.monotonic() - self._started
        with suppress(OSError):  # whoever read along is gone
            print(lines.ending(self.sweep, self.number, self.overrides, ended, seconds), flush=True)
