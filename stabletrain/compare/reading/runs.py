"""Run folders to `Run`s: ten thousand of a thousand lines in well under a minute on two cores."""

import math
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from stabletrain.compare.reading.columns import Columns, joined, read_columns
from stabletrain.compare.reading.events import read_events
from stabletrain.compare.reading.folders import find_runs
from stabletrain.compare.reading.ranges import Ranges
from stabletrain.compare.reading.run import ENDED, Run
from stabletrain.compare.reading.settings import read_settings
from stabletrain.errors import StabletrainError
from stabletrain.tracking.metrics import numbers

CHUNK = 32
"""Runs that a process reads at a time; fewer are read without other processes."""

SILENT = 3600.0
"""Seconds without a line after which a run that says it is running may have been killed."""


def read_runs(folders: Sequence[Path | str], processes: int | None = None) -> list[Run]:
    """The runs in these folders: each is a run's own, or one of a sweep, or one above several of them.

    Args:
        processes: that read at the same time; by default as many as there are cores to use.

    Raises:
        ConfigError: a folder is not there, or holds no run. A run that is damaged is no error: its status is `broken`.
        StabletrainError: one of the processes was killed.
    """
    found = find_runs([Path(folder) for folder in folders])
    if len(found) <= CHUNK or processes == 1:
        return [read_run(folder) for folder in found]
    import joblib

    chunks = [found[start : start + CHUNK] for start in range(0, len(found), CHUNK)]
    with joblib.parallel_config("loky", n_jobs=processes or -1, idle_worker_timeout=10):
        try:
            read = joblib.Parallel(batch_size=1, max_nbytes=None)(joblib.delayed(read_some)(chunk) for chunk in chunks)
        except BrokenProcessPool as error:
            raise StabletrainError(
                f"a process that read runs was killed, perhaps for its memory ({type(error).__name__}): compare fewer "
                "runs at a time"
            ) from error
    return [run for runs in read for run in runs]


def read_some(folders: Sequence[Path]) -> list[Run]:
    """The runs of these folders."""
    return [read_run(folder) for folder in folders]


def read_run(folder: Path) -> Run:
    """The run of one folder, whatever state it is in."""
    record, damage = read_record(folder / "run.json")
    overrides = typed(record)
    settings, composed = read_settings(folder, record["choices"], overrides)
    run: dict[str, Any] = {"record": record, "settings": settings, "composed": composed, "overrides": overrides}
    try:
        columns = read_columns(folder / "metrics.jsonl")
        happened = read_events(folder)
    except OSError as error:
        return Run(folder, "broken", f"its files cannot be read: {error.strerror or error}", **run)
    step, seconds = (joined(columns.kept, name)[1] for name in ("step", "time"))
    status, problem = condition(folder, record, damage, columns)
    losses = columns.curve("val/loss")
    lowest = int(np.nanargmin(losses[1])) if not np.isnan(losses[1]).all() else None
    return Run(
        folder,
        status,
        problem,
        **run,
        steps=int(step.max(initial=0)),
        incidents=happened.incidents,
        skips=happened.skips,
        rollbacks=happened.rollbacks,
        best=(math.nan, 0) if lowest is None else (float(losses[1][lowest]), int(losses[0][lowest])),
        seconds=float(seconds[-1] - seconds[0]) if len(seconds) else math.nan,
        ranges=Ranges.of(columns.kept),
    )


def read_record(file: Path) -> tuple[dict[str, Any], str | None]:
    """What a `run.json` says, and what is wrong with it; what should be a mapping in it is one, if only empty."""
    record, damage = {}, None
    try:
        record = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        damage = "there is no run.json"
    except OSError as error:
        damage = f"run.json cannot be read: {error.strerror}"
    except ValueError:
        damage = "run.json is no JSON"
    if not isinstance(record, dict):
        record, damage = {}, "run.json is no JSON object"
    record = numbers(record)
    for name in ("choices", "hardware", "model", "final", "data", "versions"):
        if not isinstance(record.get(name), dict):
            record[name] = {}
    return record, damage


def typed(record: dict[str, Any]) -> dict[str, str]:
    """What was typed, key to value, later ones winning."""
    overrides = record.get("overrides")
    pairs = [str(each).lstrip("+").partition("=") for each in overrides] if isinstance(overrides, list) else []
    return {key: value for key, _, value in pairs}


def condition(folder: Path, record: dict[str, Any], damage: str | None, columns: Columns) -> tuple[str, str | None]:
    """A run's status, and what a reader should know of it."""
    status = record.get("status")
    if damage and not (columns.lines or columns.unreadable) and not (folder / "run.json").exists():
        return "empty", "it never began: there is no run.json"
    if damage:
        return "broken", damage
    if status not in (*ENDED, "running"):
        return "broken", f"run.json says status {status!r}, which there is not"
    if columns.unreadable and not columns.lines:
        return "broken", "no line of metrics.jsonl can be read"
    count = columns.unreadable
    lost = f"{count} line{'s' if count > 1 else ''} of metrics.jsonl cannot be read" if count else None
    if status == "running":
        return status, silence(folder) or lost
    reason = record.get("reason")
    said = str(reason).strip().splitlines()[0] if reason and str(reason).strip() else None
    if not columns.lines:
        return "empty" if status != "failed" else status, said or "no step was logged"
    return status, "; ".join(each for each in (said, lost) if each) or None


def silence(folder: Path) -> str | None:
    """A sentence on a run that says it is running and has written nothing for long."""
    written = [file.stat().st_mtime for file in (folder / "metrics.jsonl", folder / "run.json") if file.exists()]
    silent = time.time() - max(written, default=0.0)
    if silent < SILENT:
        return None
    return f"it says it is running, and has written nothing for {silent / 3600:.1f} h: it may have been killed"
