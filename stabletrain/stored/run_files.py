"""What is read again of a run folder, with its types: `run.json`, `diagnosis.json`, and lines of metrics and events."""

from pathlib import Path
from typing import Annotated, Any, TypedDict

from stabletrain.stored.json_files import Count, DamagedFile, Number, difference, is_int, read_record

RUN, SWEEP = "run.json", "sweep.json"


class Steps(TypedDict, total=False):
    """The number of steps, among the last metrics of a run."""

    steps: Count


class Hardware(TypedDict, total=False):
    """The machine of a run; further keys describe it in more detail."""

    name: str | None
    precision: str | None


class Commit(TypedDict, total=False):
    """The git commit of the code."""

    commit: str
    dirty: bool


class Change(TypedDict):
    """The settings that a resume has changed after `step` steps, each as `[before, now]`."""

    step: Count
    keys: dict[str, list[Any]]


class StartTime(TypedDict):
    """When a process began to train a run, in ISO 8601."""

    time: str


class Start(StartTime, total=False):
    """One start of a run: the number of its GPUs, and what it used. One that was killed has no `energy_kwh`."""

    gpus: float
    slurm: dict[str, str]
    hours: float
    energy_kwh: float
    utilization: float


class RunRecord(TypedDict, total=False):
    """The content of `run.json`. A record of an older version, and of a run that failed to start, lacks some keys."""

    id: str | None
    status: str
    reason: str | None
    started: str | None
    ended: str | None
    resumed: list[str]
    git: Commit | None
    choices: dict[str, str | None]
    hardware: Hardware
    versions: dict[str, str | None]
    data: dict[str, Any]
    model: dict[str, Any]
    init_from: dict[str, Any]
    options: list[str]
    overrides: list[str]
    changes: list[Change]
    command: str
    host: str
    pid: int
    exit_code: int
    starts: list[Start]
    gpu_hours: float
    final: Annotated[dict[str, Number], Steps]


def read_run_record(folder: Path) -> RunRecord:
    """Returns the record of the run in a folder; NaN and infinities are words.

    Raises:
        MissingFile: there is none.
        DamagedFile: it cannot be used.
    """
    return read_record(folder / RUN, RunRecord)


def run_record_or_empty(folder: Path) -> RunRecord:
    """Returns the record of the run in a folder; empty if there is none, or it cannot be used."""
    try:
        return read_run_record(folder)
    except DamagedFile:
        return {}


class SweepCommand(TypedDict):
    """The arguments that a sweep was started with, in `sweep.json`."""

    options: list[str]
    overrides: list[str]


class SweepRecord(SweepCommand):
    """The content of `sweep.json`; see `beside/sweep/plan.py`."""

    command: str
    runs: list[list[str]] | None
    varies: list[str]
    count: Count | None
    launcher: str
    began: float


def read_sweep_command(folder: Path) -> SweepCommand:
    """Returns the arguments of the sweep in a folder; raises as `read_sweep_record`."""
    return read_record(folder / SWEEP, SweepCommand)


def read_sweep_record(folder: Path) -> SweepRecord:
    """Returns the record of the sweep in a folder.

    Raises:
        MissingFile: there is none.
        DamagedFile: it cannot be used.
    """
    return read_record(folder / SWEEP, SweepRecord)


DIAGNOSIS = "diagnosis.json"


class Also(TypedDict):
    """Another cause that holds."""

    cause: str
    confidence: float
    verdict: str
    fix: list[str]


class Sample(TypedDict, total=False):
    """A guilty sample."""

    id: int
    index: int
    source: str | None
    fault: str


class Limits(TypedDict, total=False):
    """The guard's limits in that step."""

    loss: Number
    grad_norm: Number


class Replay(TypedDict, total=False):
    """The outcome of a replay during the investigation."""

    finite: bool | None


class Diagnosis(TypedDict, total=False):
    """The keys of `diagnosis.json` that are read again. One of an older version may lack some."""

    step: Count
    kind: str
    cause: str
    confidence: float | None
    verdict: str
    fix: list[str]
    also: list[Also]
    samples: list[Sample]
    rank: int | None
    replays: dict[str, Replay]
    limits: Limits
    time: str
    not_replayable: str | None


def read_diagnosis(folder: Path) -> dict[str, Any]:
    """Returns the diagnosis in an incident's folder, with the types of `Diagnosis`; NaN and infinities are words.

    Raises:
        MissingFile: there is none.
        DamagedFile: it cannot be used.
    """
    return dict(read_record(folder / DIAGNOSIS, Diagnosis))


LAST_STEP = 2**53
"""Bound of step numbers: columns of metrics hold them as float64."""


def is_line(value: Any) -> bool:
    """Returns whether a parsed line is an object with a step, and a tick if it has one."""
    return isinstance(value, dict) and is_step(value.get("step")) and ("tick" not in value or is_step(value["tick"]))


def is_step(value: Any) -> bool:
    """Returns whether a value is a number of steps."""
    return is_int(value) and 0 <= value < LAST_STEP


class Event(TypedDict, total=False):
    """The keys of events that are read again. Every event has `event` and `step`; the others depend on its kind."""

    event: str
    kind: str | None
    loss: Number | None
    path: str | None
    cause: str | None
    verdict: str | None
    fix: list[str] | None
    signal: str | None
    text: str | None
    low: Number | None
    high: Number | None


def is_event(value: Any) -> bool:
    """Returns whether a parsed line is an event, whose keys have the types of `Event`."""
    return is_line(value) and "event" in value and difference(value, Event) is None
