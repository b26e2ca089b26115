"""Runs arms as an array job of Slurm, a task per arm, and waits for them.

An array outlives the command that waits for it, except if Ctrl-C or SIGTERM ends this command: then the array is
cancelled, and its arms save their states. The same command finds an array that still runs, and submits only the others.
`slurm/<number>/` in the folder of a what-if holds an array: its script, `array.json` until it has ended, and for each
task a folder with `arm_run.json` and `slurm.log`.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, runtime_checkable

from stabletrain.beside.whatif.arm_run import ArmRun, write_arm_run
from stabletrain.beside.whatif.outcome import REFUSED
from stabletrain.errors import ConfigError, Interrupted, StabletrainError
from stabletrain.machine.signals import StopRequest
from stabletrain.machine.slurm import FINAL_STATES, sbatch, scancel, states
from stabletrain.printable import say
from stabletrain.stored.json_files import DamagedFile, read_record
from stabletrain.tracking.metrics import replace

ARRAYS, RECORD, ARM_RUN, LOG = "slurm", "array.json", "arm_run.json", "slurm.log"
"""The folder of all arrays of a what-if; in the folder of one, its record; in the folder of a task, its files."""

POLL_S = 5.0
"""Seconds between two questions to Slurm, which serves all users of the cluster."""

FAILED_AFTER_S = POLL_S
"""Seconds for which Slurm has to call a task failed: a requeued one could be seen so for a moment."""

VISIBLE_AFTER_S = 60.0
"""Seconds after which what a task has written is seen here, on a shared file system that caches folders."""

SAVE_TIMEOUT_S = 120.0
"""Seconds to wait for the tasks of a cancelled array, which save their states."""


@runtime_checkable
class ArmArray(Protocol):
    """What submits arms to Slurm. Its text says where they run: `a Slurm array on a100, one task per arm`."""

    def script(self, folder: Path, arms: Sequence[Path]) -> str:
        """Returns the text of the batch script.

        Args:
            folder: of the array; task n finds its arm in `<n>/arm_run.json`.
            arms: the run folder of each task.

        Raises:
            ConfigError: what was asked for cannot be submitted.
        """
        ...


class ArrayRecord(TypedDict):
    """The content of `array.json`: the job's number, the step of its arms, the run folder of each task by name."""

    job: str
    stop: int
    arms: list[str]
    cancelled: bool


@dataclass(frozen=True)
class Task:
    """A task of an array.

    Attributes:
        array: the folder of the array.
        record: of the array.
        number: of the task.
    """

    array: Path
    record: ArrayRecord
    number: int

    @property
    def arm(self) -> str:
        """The name of the arm's run folder."""
        return self.record["arms"][self.number]

    @property
    def log(self) -> Path:
        """What the task has printed."""
        return self.array / str(self.number) / LOG

    def state(self, known: dict[tuple[str, int | None], str]) -> str:
        """Returns its state in Slurm; empty if Slurm does not know it any more."""
        return known.get((self.record["job"], self.number), "")


def run_array(runs: Sequence[ArmRun], slurm: ArmArray, on_finished: Callable[[ArmRun], None]) -> None:
    """Runs arms as an array, and waits until they are over; raises as `run_arms`.

    Args:
        runs: arms of one round that are not over.
        slurm: submits them.
        on_finished: called with each arm that is over.
    """
    if not runs:
        return
    folder, by_folder = runs[0].folder.parent / ARRAYS, {run.folder.name: run for run in runs}
    failed: list[str] = []

    def is_settled(task: Task, state: str, since: float) -> bool:
        run = by_folder[task.arm]
        if run.over or (run.folder / REFUSED).exists():
            on_finished(run)
        elif since < (VISIBLE_AFTER_S if state in ("", "COMPLETED") else FAILED_AFTER_S):
            return False
        else:
            failed.append(f"the arm {run.arm.name} ended as {state or 'unknown to Slurm'}, its log is {task.log}")
            say(f"{failed[-1]}; the other arms go on", flush=True)
        return True

    with StopRequest() as request:

        def stopping() -> bool:
            return bool(request.name)

        # An array of an earlier command may still run: its tasks are waited for, and not submitted again.
        live = [task for task in queued(folder) if task.arm in by_folder]
        mine = [task for task in live if not task.record["cancelled"] and task.record["stop"] == runs[0].stop]
        ending = [task for task in live if task not in mine]
        if live:
            say(f"array    {', '.join(jobs_of(live))} still runs {len(live)} of the arms: waits for it", flush=True)
        # Tasks that were cancelled, or that run to another step, must end first: two processes must not write into
        # the folder of one arm.
        wait(ending, lambda task, state, since: True, stopping)
        new = []
        for run in (run for run in runs if run.folder.name not in {task.arm for task in mine}):
            on_finished(run) if run.over else new.append(run)
        if new and not request.name:
            mine += submit(new, slurm, folder)
        wait(mine, is_settled, stopping)
        # No process waits for the arms any more, so they must not use the cluster's time.
        if request.name:
            cancel([*mine, *ending])
            raise Interrupted(f"{request.name}: the array was cancelled", saved=True)
    with suppress(StabletrainError):
        queued(folder)  # forgets the arrays that have ended
    if failed:
        raise StabletrainError(f"{'; '.join(failed)}; fix: type the command again, or leave the arm out with --arms")


def check_not_queued(runs: Sequence[ArmRun]) -> None:
    """Checks that no task of an array runs one of these arms, or waits to: two processes would write into its folder.

    Raises:
        ConfigError: one does, or Slurm does not say.
    """
    for folder in {run.folder.parent / ARRAYS for run in runs}:
        if not (records := sorted(folder.glob(f"*/{RECORD}"))):
            continue
        try:
            live = [task for task in queued(folder) if task.arm in {run.folder.name for run in runs}]
        except StabletrainError as error:
            raise ConfigError(
                f"{records[-1].parent}: this array may still run, and Slurm does not say ({error}); fix: type the "
                f"command where squeue works, or delete {records[-1]} if the array has ended"
            ) from error
        if live:
            jobs = " ".join(jobs_of(live))
            raise ConfigError(
                f"array {jobs} still runs {len(live)} of the arms; fix: add --slurm, which waits for it, or cancel it "
                f"with scancel {jobs}"
            )


def submit(runs: Sequence[ArmRun], slurm: ArmArray, folder: Path) -> list[Task]:
    """Submits arms as an array; returns its tasks.

    Raises:
        ConfigError: they cannot be submitted.
        StabletrainError: sbatch refuses them.
    """
    import torch

    number = max((int(each.name) for each in folder.glob("[0-9]*")), default=-1) + 1
    array = folder / f"{number:03d}"  # a new one: a task of an earlier array may still read its file
    text = slurm.script(array, [run.folder for run in runs])
    for task, run in enumerate(runs):
        (array / str(task)).mkdir(parents=True)  # Slurm does not create the folder of a log file
        # Another number of threads would round sums differently: the arms must compare.
        write_arm_run(run, torch.get_num_threads(), array / str(task) / ARM_RUN)
        (run.folder / REFUSED).unlink(missing_ok=True)
    script = array / "slurm.sh"
    replace(script, text)
    try:
        job = sbatch(script)
    except StabletrainError as error:
        raise StabletrainError(f"sbatch refused the array: {error}; its script is {script}") from error
    record = ArrayRecord(job=job, stop=runs[0].stop, arms=[run.folder.name for run in runs], cancelled=False)
    write_record(record, array)
    say(f"array    {job}, {len(runs)} tasks, logs {array}/<n>/{LOG}; Ctrl-C cancels it", flush=True)
    return [Task(array, record, task) for task in range(len(runs))]


def write_record(record: ArrayRecord, array: Path) -> None:
    """Writes the record of an array into its folder."""
    replace(array / RECORD, json.dumps(record, indent=2) + "\n")


def queued(folder: Path) -> list[Task]:
    """Returns the tasks of all arrays that run or wait to; removes the records of arrays that have ended.

    Raises:
        StabletrainError: Slurm does not answer.
    """
    found: list[Task] = []
    records = sorted(folder.glob(f"*/{RECORD}"))
    known = states() if records else {}
    for file in records:
        try:
            record = read_record(file, ArrayRecord)
        except DamagedFile as error:
            raise ConfigError(f"{error}; fix: scancel its array, and delete the file") from error
        tasks = [Task(file.parent, record, number) for number in range(len(record["arms"]))]
        live = [task for task in tasks if task.state(known) not in ("", *FINAL_STATES)]
        found += live
        if not live:
            file.unlink()
    return found


def jobs_of(tasks: Sequence[Task]) -> list[str]:
    """Returns the numbers of the tasks' arrays."""
    return sorted({task.record["job"] for task in tasks})


def wait(
    tasks: Sequence[Task], settled: Callable[[Task, str, float], bool], over: Callable[[], bool]
) -> Sequence[Task]:
    """Waits until all tasks are settled; returns those that are not.

    Args:
        tasks: of any arrays.
        settled: takes a task that neither runs nor waits to, its state, and for how many seconds it was seen so;
            returns whether it is settled.
        over: whether to wait no longer.
    """
    left, seen, silent = [*tasks], dict[tuple[str, int], float](), False
    while left and not over():
        now = time.monotonic()
        try:
            known, silent = states(), False
        except StabletrainError as error:
            if not silent:
                say(f"squeue does not answer ({error}): the array goes on, and this command waits", flush=True)
            silent = True
        else:
            for task in [*left]:
                key, state = (task.record["job"], task.number), task.state(known)
                if state not in ("", *FINAL_STATES):
                    seen.pop(key, None)
                elif settled(task, state, now - seen.setdefault(key, now)):
                    left.remove(task)
        while left and not over() and time.monotonic() < now + POLL_S:
            time.sleep(0.1)
    return left


def cancel(tasks: Sequence[Task]) -> None:
    """Cancels the arrays of tasks, and waits until their arms have saved their states."""
    cancelled = []
    for array, record in {task.record["job"]: (task.array, task.record) for task in tasks}.values():
        try:
            write_record({**record, "cancelled": True}, array)
            scancel(record["job"])
            cancelled.append(record["job"])
        except StabletrainError as error:
            write_record(record, array)
            say(f"array {record['job']} still runs, scancel failed ({error}); fix: scancel {record['job']}", flush=True)
    if cancelled:
        say(f"array    {', '.join(cancelled)} is cancelled: waits until the arms have saved their states", flush=True)
    end = time.monotonic() + SAVE_TIMEOUT_S
    saving = [task for task in tasks if task.record["job"] in cancelled]
    if left := wait(saving, lambda task, state, since: True, lambda: time.monotonic() > end):
        say(
            f"{len(left)} of its tasks still end after {SAVE_TIMEOUT_S:.0f} s; the same command waits for them",
            flush=True,
        )
