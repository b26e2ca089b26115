"""Finds run folders, and reads them as runs, ten thousand in well under a minute.

Where runs lie: below the folders that a person names.

What happened in a run, from its `events.jsonl`: incidents, skips, rollbacks.

Events are never cut back: a run that was continued from a checkpoint runs some steps again and tells of them again. An
event with the same `tick`, the number of steps executed, is the same event, and the newest telling counts.

Run folders to `Run`s: ten thousand of a thousand lines in well under a minute on two cores.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from stabletrain.compare.reading.columns import Columns, blocks, joined, read_columns
from stabletrain.compare.reading.run import ENDED, Ranges, Run
from stabletrain.compare.reading.settings import read_settings
from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.tracking.metrics import numbers

SIGNS = ("run.json", "metrics.jsonl", ".hydra")
"""What makes a folder a run's: one of these; a run that was refused before it began has `.hydra` only."""


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders that these are, or that lie below them, each once; 2 comes before 10.

    Nothing is looked for inside a run's folder, so its checkpoints cost no time.

    Raises:
        ConfigError: a folder is not there, or holds no run.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "is not there"
            raise ConfigError(f"{folder} {what}: name a run folder or a sweep's, such as multirun/<date>/<time>")
        runs = sorted(below(folder, set()), key=lambda run: [natural(part) for part in run.parts])
        if not runs:
            raise ConfigError(f"{folder}: there is no run here: name a run folder or a sweep's, multirun/<date>/<time>")
        for run in runs:
            found.setdefault(os.path.realpath(run), run)
    return [*found.values()]


def below(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """The run folders at or below one; what cannot be listed is passed over, and a circle of links walked once."""
    try:
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in seen:
            return
        seen.add((here.st_dev, here.st_ino))
        with os.scandir(folder) as entries:
            inside = {entry.name: entry.is_dir() for entry in entries}
    except OSError:
        return
    if any(sign in inside for sign in SIGNS):
        yield folder
        return
    for name, is_folder in inside.items():
        if is_folder and not name.startswith("."):
            yield from below(folder / name, seen)


def natural(name: str) -> tuple[int, str]:
    """Sorts 2 before 10."""
    return (int(name), "") if name.isdecimal() else (10**9, name)


@dataclass
class Happened:
    """A run's events.

    Attributes:
        incidents: mappings with step, kind, cause, verdict, fix (a list) and path (relative to the run's folder; None
            where nothing could be written), in their order.
        skips: the steps whose update was withheld, but for fp16's routine overflow, in their order.
        rollbacks: how many.
    """

    incidents: list[dict[str, Any]] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)
    rollbacks: int = 0


def read_events(folder: Path) -> Happened:
    """The events of the run in `folder`.

    Raises:
        OSError: its `events.jsonl` is there and cannot be read.
    """
    told: dict[tuple[str, Any], dict[str, Any]] = {}
    for lines, _ in blocks(folder / "events.jsonl"):
        for line in lines:
            if isinstance(line, dict) and isinstance(line.get("step"), int) and line.get("event") in KINDS:
                told[line["event"], line.get("tick", line["step"])] = line
    found = Happened()
    for (event, _), line in told.items():
        if event == "incident":
            found.incidents.append(incident(folder, line))
        elif event == "rollback":
            found.rollbacks += 1
        elif line.get("kind") != "overflow":
            found.skips.append(line["step"])
    return found


KINDS = ("incident", "skip", "rollback")
"""Events that are looked at."""


def incident(folder: Path, line: dict[str, Any]) -> dict[str, Any]:
    """An incident as it is compared; its kind (nonfinite, spike, loss_scale) stands in its own folder."""
    path = line.get("path") if isinstance(line.get("path"), str) else None
    return {
        "step": line["step"],
        "kind": None if path is None else kind_of(folder / path / "diagnosis.json"),
        "cause": line.get("cause"),
        "verdict": line.get("verdict"),
        "fix": line.get("fix") if isinstance(line.get("fix"), list) else [],
        "path": path,
    }


def kind_of(file: Path) -> str | None:
    """The kind that a diagnosis names; None where it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("kind") if isinstance(found, dict) else None


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
