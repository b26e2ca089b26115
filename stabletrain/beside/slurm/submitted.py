"""What has been submitted to Slurm from a folder, in its `slurm.json`, and where those jobs stand in the queue."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypedDict

from stabletrain.beside.slurm.script import Job
from stabletrain.errors import StabletrainError
from stabletrain.machine.slurm import FINAL_STATES, states
from stabletrain.stored.json_files import DamagedFile, read_record
from stabletrain.tracking.metrics import replace

RECORD = "slurm.json"


class Submitted(TypedDict):
    """A job that was submitted.

    `job` is Slurm's number, `gpu` the section of cluster.conf. `runs` maps each run folder (`.` for this one) to its
    overrides, and `tasks` to its task of an array; empty if it is none.
    """

    job: str
    gpu: str
    runs: dict[str, list[str]]
    tasks: dict[str, int]


class Jobs(TypedDict):
    """The content of `slurm.json`: all jobs that were submitted from its folder, the oldest first."""

    jobs: list[Submitted]


def record(job: Job, number: str) -> None:
    """Adds a job to the record of its folder."""
    runs = {str(n): job.overrides[n] for n in job.tasks} if job.tasks else {".": job.overrides[0]}
    tasks = {str(n): task for task, group in job.groups.items() for n in group}
    found = Submitted(job=number, gpu=job.card.name, runs=runs, tasks=tasks)
    replace(job.folder / RECORD, json.dumps(Jobs(jobs=[*submitted(job.folder), found]), indent=1) + "\n")


def submitted(folder: Path) -> list[Submitted]:
    """Returns the jobs that were submitted from a folder, oldest first; empty without a valid record."""
    try:
        return read_record(folder / RECORD, Jobs)["jobs"]
    except DamagedFile:
        return []


class QueuedRun(NamedTuple):
    """A run that was submitted, by its newest job.

    Attributes:
        folder: its run folder.
        overrides: as submitted.
        job: Slurm's number, such as 17, or 17_3 for a task of an array.
        state: as Slurm names it, such as PENDING; empty if it has left the queue, None if the queue is unknown.
    """

    folder: Path
    overrides: list[str]
    job: str
    state: str | None


def submitted_runs(folder: Path) -> Iterator[QueuedRun]:
    """Yields every run that was submitted from a folder, or from the folders of GPU types in it."""
    places = [place for place in (folder, *sorted(folder.glob("*/"))) if (place / RECORD).exists()]
    queue = states_of_all() if places else None
    for place in places:
        newest = {name: job for job in submitted(place) for name in job["runs"]}
        for name, job in newest.items():
            task = job["tasks"].get(name)
            state = None if queue is None else queue.get((job["job"], task), "")
            number = job["job"] if task is None else f"{job['job']}_{task}"
            yield QueuedRun(place / name, job["runs"][name], number, "" if state in FINAL_STATES else state)


def states_of_all() -> dict[tuple[str, int | None], str] | None:
    """Returns the state of each job in the queue, of all users; None where Slurm is not, or does not answer."""
    try:
        return states(everyone=True)
    except StabletrainError:
        return None
