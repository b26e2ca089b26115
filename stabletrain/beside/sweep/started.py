"""A sweep that a command has started: what it prints, how a signal stops it, and its exit code."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stabletrain.beside.sweep import lines, plan
from stabletrain.beside.sweep.member import stopping_all
from stabletrain.config.arguments import Arguments
from stabletrain.extension import NoSweep


@dataclass(frozen=True)
class StartedSweep(NoSweep):
    """A sweep that has started.

    Attributes:
        sweep: as `sweep.json` records it.
    """

    sweep: plan.Sweep

    def opening(self) -> str:
        """Returns the number of runs, the folder, and how many runs are done already."""
        return lines.opening(self.sweep)

    def listening(self) -> AbstractContextManager[Any]:
        """Returns a context in which a signal stops all runs."""
        # The runs of a parallel sweep ignore signals from outside: this process passes them on.
        return nullcontext() if self.sweep.launcher == "basic" else stopping_all(self.sweep.folder)

    def closing(self) -> str:
        """Returns the summary, if any run has started."""
        return lines.closing(self.sweep) if self.sweep.records() else ""

    def exit_code(self) -> int:
        """Returns the exit code of the first run that did not finish."""
        return lines.code(self.sweep)


def start_sweep(typed: Arguments, config_dir: Path) -> tuple[NoSweep, Arguments]:
    """Records the sweep that a command line asks for, if any; see `plan.start_sweep`."""
    sweep, arguments = plan.start_sweep(typed, config_dir)
    return NoSweep() if sweep is None else StartedSweep(sweep), arguments
