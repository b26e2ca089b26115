"""Reads `run.json`, the record of a run, and `sweep.json`, that of a sweep."""

from pathlib import Path
from typing import Annotated, Any, TypedDict

from stabletrain.stored.json_files import Count, DamagedFile, Number, read_record

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
    """The content of `sweep.json`; see `cli/sweep/plan.py`."""

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
