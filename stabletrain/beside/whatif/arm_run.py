"""One arm up to a step, as a run in this process: its command line, its folder, and why it could not be built.

An arm that was interrupted goes on from its newest checkpoint.
"""

import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.base import KEEP_ONE_CHECKPOINT, QUIET_OVERRIDES, BaseRun
from stabletrain.beside.whatif.job import train_until
from stabletrain.beside.whatif.outcome import REFUSED, is_over
from stabletrain.beside.whatif.start import has_checkpoint
from stabletrain.config.arguments import Arguments
from stabletrain.errors import ConfigError, Interrupted, StabletrainError
from stabletrain.parallel.ranks import current_ranks, run_on_main
from stabletrain.printable import say
from stabletrain.tracking.metrics import replace
from stabletrain.trainer.run import TrainingRun


@dataclass(frozen=True)
class ArmRun:
    """An arm up to a step.

    Attributes:
        base: the run that it repeats.
        arm: the arm.
        start: the checkpoint from which it starts.
        folder: its run folder.
        stop: the step.
    """

    base: BaseRun
    arm: Arm
    start: Path
    folder: Path
    stop: int

    @property
    def over(self) -> bool:
        """Whether nothing is left to run."""
        return is_over(self.folder, self.stop)


@dataclass(frozen=True)
class ReachedStep:
    """Whether a run has done `stop` steps."""

    stop: int

    def __call__(self, run: TrainingRun) -> bool:
        return run.state.step >= self.stop


def run_arm(run: ArmRun, live: bool, listening: bool = True) -> None:
    """Runs an arm in this process; a run that cannot be built leaves the reason in its folder.

    Args:
        run: the arm.
        live: whether to show a live line.
        listening: whether signals stop it.

    Raises:
        Interrupted: a signal arrived; the state is saved.
    """
    ranks = current_ranks()
    try:
        arguments = run_on_main(ranks, lambda: arguments_of(run))
        train_until(arguments, ReachedStep(run.stop), run.arm.name, live, listening)
    except ConfigError as error:
        if ranks.is_main:
            run.folder.mkdir(parents=True, exist_ok=True)
            replace(run.folder / REFUSED, f"{error}\n")


def arguments_of(run: ArmRun) -> Arguments:
    """Returns the command line that starts an arm, or goes on with it; empties the folder of an arm that has no state.

    It is called on the main process only.
    """
    # The last step is evaluated, so an evaluation at the multiples of it is one at the end.
    words = (*run.arm.overrides, *QUIET_OVERRIDES, *KEEP_ONE_CHECKPOINT, f"eval_every={run.stop}")
    (run.folder / REFUSED).unlink(missing_ok=True)
    if has_checkpoint(run.folder):
        return run.base.continued(words, run.folder)
    shutil.rmtree(run.folder, ignore_errors=True)
    return run.base.resumed(run.start, words, run.folder)


def run_in_process(run: ArmRun, threads: int) -> None:
    """Runs an arm as the only work of a process, whose exit code says how it ended."""
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one passes it on
    try:
        run_arm(run, live=False)
    except Interrupted as error:
        sys.exit(error.exit_code)
    except StabletrainError as error:
        say(f"{run.arm.name}: {error}", file=sys.stderr)
        sys.exit(1)
