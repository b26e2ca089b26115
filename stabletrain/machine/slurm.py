"""Slurm's commands: submits a script, asks for the states of tasks, and cancels a job.

They run in sessions of their own, so that Ctrl-C reaches only this process: a submission is never cut off halfway.
"""

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from stabletrain.errors import StabletrainError

FINAL_STATES = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PREEMPTED", "REVOKED", "TIMEOUT"),
    )
)
"""States of a task that does not run again. A task that Slurm requeues is COMPLETING, then PENDING."""


def has_slurm() -> bool:
    """Whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def sbatch(script: Path) -> str:
    """Submits a batch script; returns the number of the job.

    Raises:
        StabletrainError: Slurm refuses it; the message is its reason.
    """
    return run_slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def scancel(job: str) -> None:
    """Cancels a job, or every task of an array.

    Raises:
        StabletrainError: Slurm refuses it; the message is its reason.
    """
    run_slurm("scancel", job)


def states(*, everyone: bool = False) -> dict[tuple[str, int | None], str]:
    """Returns the state of each of the user's jobs, by its number and None, or the array's number and the task's own.

    Slurm forgets a task some minutes after its end.

    Args:
        everyone: whether jobs of other users count too.

    Raises:
        StabletrainError: Slurm does not answer; the message is its reason.
    """
    user = [] if everyone else ["-u", str(os.getuid())]
    lines = run_slurm("squeue", "-h", "-r", *user, "-t", "all", "-o", "%F %K %T").splitlines()
    words = [line.split() for line in lines]
    return {(job, int(task) if task.isdecimal() else None): state for job, task, state in words}


def max_array_size() -> int | None:
    """Returns how many tasks an array may have, numbered from 0; None if Slurm does not say."""
    with suppress(StabletrainError):
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_slurm("scontrol", "show", "config"), re.MULTILINE)
        return None if found is None else int(found[1])
    return None


def run_slurm(*command: str) -> str:
    """Returns what one of Slurm's commands prints.

    Raises:
        StabletrainError: it fails, or is not installed.
    """
    # The user's own filters, such as SQUEUE_PARTITION, would hide tasks.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, start_new_session=True)
    except OSError as error:
        raise StabletrainError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise StabletrainError(" ".join(done.stderr.split()).removeprefix(f"{command[0]}: error: "))
    return done.stdout
