"""Finds run folders and reads each of them as a `Run`.

Incidents, skips and rollbacks are read from `events.jsonl`, which is never truncated: a run that resumes from a
checkpoint executes some steps again and logs their events again. Events of the same kind with the same `tick` (number
of executed steps) are the same event, and the last one counts. `benchmarks/reading.py` measures the speed.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stabletrain.beside.comparison.reading.columns import Columns, as_float, blocks, joined, read_columns
from stabletrain.beside.comparison.reading.run import ENDED, Events, Ranges, Run
from stabletrain.beside.comparison.reading.settings import changed_settings, read_settings
from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.stored.json_files import DamagedFile
from stabletrain.stored.run_files import is_event, read_diagnosis
from stabletrain.tracking.run_folder import usable_record

SIGNS = ("run.json", "metrics.jsonl", ".hydra")
"""A folder that contains one of these is a run folder. A run that was rejected at startup has only `.hydra`."""


def is_run(folder: Path) -> bool:
    """Returns whether `folder` is a run folder."""
    return any((folder / sign).exists() for sign in SIGNS)


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns the run folders at or below `folders`, each once, sorted by name with 2 before 10.

    Does not search inside run folders.

    Raises:
        ConfigError: a folder does not exist, or contains no runs.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise ConfigError(f"{folder} {what}: name a run folder or a sweep folder, such as multirun/<date>/<time>")
        runs = sorted(below(folder, set()), key=lambda run: [natural_order(part) for part in run.parts])
        if not runs:
            raise ConfigError(
                f"{folder} contains no runs: name a run folder or a sweep folder, such as multirun/<date>/<time>"
            )
        for run in runs:
            try:
                str(run).encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"{run}: its name is no UTF-8, so no table or page can hold it: rename it") from error
            found.setdefault(os.path.realpath(run), run)
    return [*found.values()]


def below(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Yields the run folders at or below `folder`. Ignores folders that cannot be listed."""
    try:
        here = os.stat(folder)  # links may form a cycle, so visit each folder once
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


def natural_order(name: str) -> tuple[int, str]:
    """Returns a sort key that puts 2 before 10."""
    return (int(name), "") if name.isdecimal() else (10**9, name)


def read_events(folder: Path) -> tuple[Events, int]:
    """Reads the events of the run in `folder`; raises OSError if `events.jsonl` exists but cannot be read.

    Returns:
        the events, and the number of damaged lines, not counting an unfinished last line.
    """
    told: dict[tuple[str, Any], dict[str, Any]] = {}
    unreadable = 0
    for lines, invalid in blocks(folder / "events.jsonl"):
        unreadable += invalid
        for line in lines:
            if not is_event(line):
                unreadable += 1
            elif line["event"] == "restore":  # that step was taken again, so it was not skipped
                told.pop(("skip", line.get("tick", line["step"])), None)
            elif line["event"] in KINDS:
                told[line["event"], line.get("tick", line["step"])] = line
    found = Events(rollbacks=sum(event == "rollback" for event, _ in told))
    for (event, _), line in told.items():
        if event == "incident":
            found.incidents.append(incident(folder, line))
        elif event == "forecast":
            found.forecasts.append({name: line.get(name) for name in FORECAST})
        elif event in ("heal", "unhealed"):
            found.whatifs.append(whatif(line))
        elif event == "skip" and line.get("kind") != "overflow":
            found.skips.append(line["step"])
            found.skip_losses.append(as_float(line.get("loss")))
    return found, unreadable


KINDS = ("incident", "skip", "rollback", "forecast", "heal", "unhealed")
"""Event kinds that are read, besides `restore`; all others are ignored."""

FORECAST = ("step", "signal", "low", "high", "text")
"""The fields of a forecast that are read."""

WHATIF = ("step", "tick", "reason", "to", "arm", "arms", "steps", "why")
"""The fields of a `heal` or `unhealed` that are read: what was tried after a halt, and the arm that won, or ""."""


def whatif(line: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `heal` or `unhealed`, and the path of its page, relative to the run folder."""
    found = {name: line.get(name) for name in WHATIF}
    numbers = {name: found[name] if isinstance(found[name], int) else 0 for name in ("tick", "to", "steps")}
    arms = [str(arm) for arm in found["arms"]] if isinstance(found["arms"], list) else []
    arm = str(found["arm"] or "") if line["event"] == "heal" else ""
    path = f"whatif/halt-{numbers['tick']:08d}/whatif.html"
    return {**found, **numbers, "arms": arms, "arm": arm, "path": path}


def incident(folder: Path, line: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of an incident; its kind is read from its `diagnosis.json`."""
    path = line.get("path")
    return {
        "step": line["step"],
        "kind": None if path is None else kind_of(folder / path),
        "cause": line.get("cause"),
        "verdict": line.get("verdict"),
        "fix": line.get("fix") or [],
        "path": path,
    }


def kind_of(incident: Path) -> str | None:
    """Returns the kind of an incident (nonfinite, spike, loss_scale ...), or None if its diagnosis cannot be read."""
    try:
        return read_diagnosis(incident).get("kind")
    except (DamagedFile, ValueError):  # a path with a NUL is a ValueError
        return None


CHUNK = 32
"""Runs per task of a worker process. Up to this many runs are read without worker processes."""

SILENT = 3600.0
"""Seconds without output after which a run with status `running` may have been killed."""


def read_runs(folders: Sequence[Path | str], processes: int | None = None) -> list[Run]:
    """Reads all runs at or below these folders. Copies of one run, which have the same id, count once.

    Args:
        folders: run folders, sweep folders, or folders that contain them.
        processes: number of worker processes; by default one per available core.

    Raises:
        ConfigError: a folder does not exist, or contains no runs. A damaged run only has the status `broken`.
        StabletrainError: a worker process was killed.
    """
    found = find_runs([Path(folder) for folder in folders])
    if len(found) <= CHUNK or processes == 1:
        return with_distinct_names([read_run(folder) for folder in found])
    import joblib

    with joblib.parallel_config("loky", n_jobs=processes or -1, idle_worker_timeout=10):
        try:
            read = joblib.Parallel(batch_size=CHUNK, max_nbytes=None)(joblib.delayed(read_run)(each) for each in found)
        except BrokenProcessPool as error:
            raise StabletrainError(
                f"a worker process that reads runs was killed ({type(error).__name__}), perhaps because memory ran "
                "out: compare fewer runs at a time"
            ) from error
    return with_distinct_names(read)


def with_distinct_names(runs: Sequence[Run]) -> list[Run]:
    """Keeps one run of each id, and labels the runs if several of them have the same folder name.

    Of several copies, keeps the one with the most steps; its `copies` and its `problem` name the others.
    """
    same: dict[str, list[Run]] = {}
    for place, run in enumerate(runs):
        known = run.record.get("id")
        same.setdefault(known if isinstance(known, str) and known else f"no id: {place}", []).append(run)
    kept = []
    for copies in same.values():
        first = max(copies, key=lambda run: (run.steps, run.status in ENDED))
        others = tuple(run.folder for run in copies if run is not first)
        if others:
            note = f"counted once: run {first.record['id']} is also in {', '.join(map(str, others))}"
            first = replace(first, copies=others, problem="; ".join(filter(None, (first.problem, note))))
        kept.append(first)
    labels = names_of([run.folder for run in kept])
    return [run if label == run.name else replace(run, label=label) for run, label in zip(kept, labels, strict=True)]


def names_of(folders: Sequence[Path]) -> list[str]:
    """Returns the names of the folders, each after as many of its parent folders as make all names different."""
    parts = [folder.absolute().parts for folder in folders]
    found: list[str] = []
    for depth in range(1, max(map(len, parts), default=0) + 1):
        found = ["/".join(each[-depth:]) for each in parts]
        if len({*found}) == len(found):
            break
    return found


def read_run(folder: Path) -> Run:
    """Reads the run in `folder`, whatever its state."""
    record, damage = read_record(folder / "run.json")
    overrides = parsed_overrides(record)
    settings, composed = read_settings(folder, record["choices"], overrides)
    settings |= changed_settings(record)
    run: dict[str, Any] = {"record": record, "settings": settings, "composed": composed, "overrides": overrides}
    try:
        columns = read_columns(folder / "metrics.jsonl")
        events, lost_events = read_events(folder)
    except OSError as error:
        return Run(folder, "broken", f"its files cannot be read: {error.strerror or error}", **run)
    step, seconds = (joined(columns.kept, name)[1] for name in ("step", "time"))
    status, problem = status_and_problem(folder, record, damage, columns, lost_events)
    losses = columns.curve("val/loss")
    last = record["final"].get("steps")  # a run that was halted early may have logged no step but the first
    lowest = int(np.nanargmin(losses[1])) if not np.isnan(losses[1]).all() else None
    return Run(
        folder,
        status,
        problem,
        **run,
        steps=max(int(step.max(initial=0)), last if isinstance(last, int) else 0),
        **vars(events),
        best=(math.nan, 0) if lowest is None else (float(losses[1][lowest]), int(losses[0][lowest])),
        seconds=float(seconds[-1] - seconds[0]) if len(seconds) else math.nan,
        ranges=Ranges.of(columns.kept),
    )


def read_record(file: Path) -> tuple[dict[str, Any], str | None]:
    """Returns what can be used of a `run.json`, and what is wrong with it. Missing nested mappings become empty."""
    record, error = usable_record(file.parent)
    for name in ("choices", "hardware", "model", "final", "data", "versions"):
        if not isinstance(record.get(name), dict):
            record[name] = {}
    return record, None if error is None else str(error).removeprefix(f"{file.parent}/")


def parsed_overrides(record: dict[str, Any]) -> dict[str, str]:
    """Returns the command-line overrides, key to value; the last one of a key wins."""
    overrides = record.get("overrides")
    pairs = [str(each).lstrip("+").partition("=") for each in overrides] if isinstance(overrides, list) else []
    return {key: value for key, _, value in pairs}


def status_and_problem(
    folder: Path, record: dict[str, Any], damage: str | None, columns: Columns, lost_events: int
) -> tuple[str, str | None]:
    """Returns a run's status, and one sentence about what is unusual in the run, or None."""
    status = record.get("status")
    if damage and not (columns.lines or columns.unreadable) and not (folder / "run.json").exists():
        return "empty", "the run never started: run.json is missing"
    if damage and "status" not in record:
        return "broken", damage
    if status not in (*ENDED, "running"):
        return "broken", f"run.json has an unknown status: {status!r}"
    if columns.unreadable and not columns.lines:
        return "broken", "no line of metrics.jsonl can be read"
    counts = {"metrics.jsonl": columns.unreadable, "events.jsonl": lost_events}
    lines = [f"{n} line{'s' if n > 1 else ''} of {name} cannot be read" for name, n in counts.items() if n]
    lost = "; ".join([*([damage] if damage else []), *lines]) or None
    if status == "running":
        return status, silence(folder) or lost
    reason = record.get("reason")
    said = str(reason).strip().splitlines()[0] if reason and str(reason).strip() else None
    if not columns.lines:
        return "empty" if status != "failed" else status, said or "no step was logged"
    return status, "; ".join(each for each in (said, lost) if each) or None


def silence(folder: Path) -> str | None:
    """Returns a sentence if a run with status `running` has written nothing for `SILENT` seconds, else None."""
    silent = time.time() - last_written(folder)
    if silent < SILENT:
        return None
    return f"the status is running, but nothing was written for {silent / 3600:.1f} h: the run may have been killed"


def last_written(folder: Path) -> float:
    """Returns when the run in `folder` last wrote its record or a line, in seconds since 1970; 0 if it never did."""
    trying = folder.glob("whatif/halt-*/*/metrics.jsonl")  # arms, which a run tries after a halt
    files = (folder / "metrics.jsonl", folder / "run.json", *trying)
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
