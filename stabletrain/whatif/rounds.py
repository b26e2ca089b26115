"""Runs arms up to a step: in this process, several at once in processes of their own, or as an array job of Slurm.

An arm that is over is not run again. One that was interrupted goes on from its newest checkpoint. So a what-if that was
interrupted is continued by the same command.
"""

import multiprocessing
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, runtime_checkable

from stabletrain.config.arguments import Arguments
from stabletrain.errors import ConfigError, Interrupted, StabletrainError
from stabletrain.machine.signals import StopRequest
from stabletrain.parallel.ranks import current_ranks, run_on_main
from stabletrain.printable import say
from stabletrain.tracking.metrics import replace
from stabletrain.trainer.run import TrainingRun
from stabletrain.whatif.arms import Arm
from stabletrain.whatif.base import KEEPING, QUIET, Base
from stabletrain.whatif.job import train_until
from stabletrain.whatif.outcome import REFUSED, is_over
from stabletrain.whatif.start import begun

POLL = 0.2
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class Leg:
    """An arm up to a step.

    Attributes:
        base: the run that it repeats.
        arm: the arm.
        start: the checkpoint from which it starts.
        folder: its run folder.
        stop: the step.
    """

    base: Base
    arm: Arm
    start: Path
    folder: Path
    stop: int

    @property
    def over(self) -> bool:
        """Whether nothing is left to run."""
        return is_over(self.folder, self.stop)


@dataclass(frozen=True)
class Reached:
    """Whether a run has done `stop` steps."""

    stop: int

    def __call__(self, run: TrainingRun) -> bool:
        return run.state.step >= self.stop


@runtime_checkable
class ArmArray(Protocol):
    """What submits arms to Slurm. Its text says where they run: `a Slurm array on a100, one task per arm`."""

    def script(self, folder: Path, arms: Sequence[Path]) -> str:
        """Returns the text of the batch script.

        Args:
            folder: of the array; task n finds its arm in `<n>/leg.json`.
            arms: the run folder of each task.

        Raises:
            ConfigError: what was asked for cannot be submitted.
        """
        ...


def run_leg(leg: Leg, live: bool, listening: bool = True) -> None:
    """Runs an arm in this process; a run that cannot be built leaves the reason in its folder.

    Args:
        leg: the arm.
        live: whether to show a live line.
        listening: whether signals stop it.

    Raises:
        Interrupted: a signal arrived; the state is saved.
    """
    ranks = current_ranks()
    try:
        train_until(run_on_main(ranks, lambda: arguments_of(leg)), Reached(leg.stop), leg.arm.name, live, listening)
    except ConfigError as error:
        if ranks.is_main:
            leg.folder.mkdir(parents=True, exist_ok=True)
            replace(leg.folder / REFUSED, f"{error}\n")


def arguments_of(leg: Leg) -> Arguments:
    """Returns the command line that starts an arm, or goes on with it; empties the folder of an arm that has no state.

    It is called on the main process only.
    """
    # The last step is evaluated, so an evaluation at the multiples of it is one at the end.
    words = (*leg.arm.overrides, *QUIET, *KEEPING, f"eval_every={leg.stop}")
    (leg.folder / REFUSED).unlink(missing_ok=True)
    if begun(leg.folder):
        return leg.base.continued(words, leg.folder)
    shutil.rmtree(leg.folder, ignore_errors=True)
    return leg.base.resumed(leg.start, words, leg.folder)


def run_legs(legs: Sequence[Leg], jobs: int, told: Callable[[Leg], None], slurm: ArmArray | None = None) -> None:
    """Runs arms.

    Args:
        legs: the arms; those that are over are not run.
        jobs: number of processes; 1 for this one.
        told: called with each arm that is over.
        slurm: runs them as an array job instead; it has a limit of its own.

    Raises:
        Interrupted: a signal arrived; the states are saved.
        StabletrainError: an arm ended with an error.
    """
    from stabletrain.whatif.array import check_not_queued, run_array

    for leg in legs:
        if leg.over:
            told(leg)
    left = [leg for leg in legs if not leg.over]
    if slurm is not None:
        run_array(left, slurm, told)
        return
    check_not_queued(left)
    if jobs == 1:
        for leg in left:
            run_leg(leg, live=True)
            told(leg)
    elif left:
        run_processes(left, jobs, told)


def run_processes(legs: Sequence[Leg], jobs: int, told: Callable[[Leg], None]) -> None:
    """Runs arms in processes of their own, at most `jobs` at a time; raises as `run_legs`."""
    import torch

    context = multiprocessing.get_context("spawn")
    threads = torch.get_num_threads()  # another number would round sums differently: the arms must compare
    waiting, running = list(legs), list[tuple[Leg, BaseProcess]]()
    failed: list[str] = []
    stopping = False
    with StopRequest() as request:
        while running or (waiting and not request.name and not failed):
            while waiting and len(running) < jobs and not request.name and not failed:
                leg = waiting.pop(0)
                process = context.Process(target=in_process, args=(leg, threads), name=leg.arm.name)
                process.start()
                running.append((leg, process))
            time.sleep(POLL)
            if (request.name or failed) and not stopping:
                stopping = True
                for _, process in running:
                    process.terminate()  # once: it saves its state, and ends
            for leg, process in [each for each in running if not each[1].is_alive()]:
                running.remove((leg, process))
                if process.exitcode == 0:
                    told(leg)
                elif not stopping:
                    failed.append(f"the arm {leg.arm.name} ended with exit code {process.exitcode}")
    if failed:
        raise StabletrainError(f"{'; '.join(failed)}; what it printed is above; fix: leave it out with --arms")
    if request.name:
        raise Interrupted(f"{request.name}: the arms were stopped", saved=True)


def in_process(leg: Leg, threads: int) -> None:
    """Runs an arm as the only work of a process, whose exit code says how it ended."""
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one passes it on
    try:
        run_leg(leg, live=False)
    except Interrupted as error:
        sys.exit(error.exit_code)
    except StabletrainError as error:
        say(f"{leg.arm.name}: {error}", file=sys.stderr)
        sys.exit(1)
