"""One arm up to a step, as a run in this process: its command line, its folder, and why it could not be built.

An arm that was interrupted goes on from its newest checkpoint.

A task of an array job runs one: `python -m stabletrain.beside.whatif.arm_run <file>`. The file is JSON. With the same
number of threads an arm has the same bits as in the process that wrote the file.
"""

import json
import os
import shutil
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.base import KEEP_ONE_CHECKPOINT, QUIET_OVERRIDES, BaseRun
from stabletrain.beside.whatif.job import train_until
from stabletrain.beside.whatif.outcome import REFUSED, is_over
from stabletrain.beside.whatif.start import has_checkpoint
from stabletrain.config.arguments import Arguments
from stabletrain.config.resuming import Settings
from stabletrain.errors import ConfigError, Interrupted, StabletrainError
from stabletrain.parallel.ranks import current_ranks, run_on_main
from stabletrain.printable import say
from stabletrain.stored.json_files import read_record
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


class ArmRunRecord(TypedDict):
    """The content of the file: the fields of an `ArmRun`, and the number of threads."""

    base: dict[str, Any]
    arm: dict[str, Any]
    start: str
    folder: str
    stop: int
    threads: int


def write_arm_run(run: ArmRun, threads: int, file: Path) -> None:
    """Writes an arm and its number of threads to a file."""
    replace(file, json.dumps({**asdict(run), "threads": threads}, default=os.fspath, indent=2) + "\n")


def read_arm_run(file: Path) -> tuple[ArmRun, int]:
    """Reads an arm and its number of threads.

    Raises:
        DamagedFile: the file is missing, or does not hold them.
    """
    found: dict[str, Any] = dict(read_record(file, ArmRunRecord))
    threads = found.pop("threads")
    # Every field goes back to where it came from, also those that an arm may get later.
    base: dict[str, Any] = {**found["base"], "run": Path(found["base"]["run"])}
    base |= {"arguments": Arguments(*base["arguments"]), "settings": Settings(*base["settings"])}
    base["changes"] = tuple(base["changes"])
    arm: dict[str, Any] = {**found["arm"]}
    arm |= {name: tuple(arm[name]) for name in ("overrides", "states")}
    found |= {
        "base": BaseRun(**base),
        "arm": Arm(**arm),
        "start": Path(found["start"]),
        "folder": Path(found["folder"]),
    }
    return ArmRun(**found), threads


if __name__ == "__main__":
    run_in_process(*read_arm_run(Path(sys.argv[1])))
