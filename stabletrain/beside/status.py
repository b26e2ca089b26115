"""`stabletrain status`: where each run of a sweep stands, on one screen, with what needs attention first.

It reads the run folders, the plan of the sweep (`sweep.json`, or `slurm.json` of what `slurm/launch.sh` has submitted),
and, where there is one, Slurm's queue.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any

from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.runs import find_runs, last_written, natural_order, read_run
from stabletrain.beside.slurm.submitted import QueuedRun, submitted_runs
from stabletrain.beside.sweep import plan
from stabletrain.errors import ConfigError
from stabletrain.printable import one_line, say
from stabletrain.tracking.metrics import print_json
from stabletrain.tracking.progress import elapsed

STATES = ("failed", "broken", "silent", "halted", "preempted", "running", "queued", "finished")
"""The states of a run, in the order of the lines.

| state | |
|---|---|
| failed | it ended with an error, or its job left the queue before it began |
| broken | its record cannot be read |
| silent | it has not ended, but has written nothing for long |
| halted | the guard has halted it |
| preempted | it has saved its state and waits to go on |
| running | it trains, or its job has just started |
| queued | it has not started yet |
| finished | |
"""

SILENT_S = 300.0
"""Least number of seconds without a sign of life after which a run counts as silent."""

SILENT_LINES = 10
"""A run is not silent before so many times its longest time between two lines."""


@dataclass(frozen=True)
class Standing:
    """Where a run stands; `stabletrain status --json` prints these fields of each run.

    Attributes:
        run: its name in the sweep's folder.
        folder: the run folder.
        overrides: those that not all runs share.
        state: one of `STATES`.
        step, steps: steps done, and planned; None if not known.
        seconds_left: estimated time of training until it has done them; None if not known.
        val_loss: the last validation loss; None if there is none.
        note: what to know, such as the reason of a failure; None for nothing.
        job: number of its Slurm job; None outside Slurm.
        gpu_hours: of all starts that have ended; None without GPUs.
    """

    run: str
    folder: str
    overrides: str
    state: str
    step: int
    steps: int | None
    seconds_left: float | None
    val_loss: float | None
    note: str | None
    job: str | None
    gpu_hours: float | None


def standings(folder: Path) -> list[Standing]:
    """Returns where each run at or below a folder stands, those first that need attention.

    Raises:
        ConfigError: the folder does not exist, or nothing was planned or run in it.
    """
    queued = {each.folder: each for each in submitted_runs(folder)}
    sweep = plan.read(folder)
    planned = {each.folder: each.overrides for each in queued.values()}
    if sweep is not None and sweep.runs is not None:
        planned |= {folder / str(number): overrides for number, overrides in enumerate(sweep.runs)}
    runs = {}
    try:
        runs = {place: read_run(place) for place in find_runs([folder])}
    except ConfigError:  # there is no run yet
        if not planned:
            raise
    overrides = planned | {place: run.record.get("overrides", []) for place, run in runs.items()}
    shared = set.intersection(*map(set, overrides.values())) if len(overrides) > 1 else set()
    found = []
    for place in {**planned, **runs}:
        name = str(place.relative_to(folder)) if place != folder else place.absolute().name
        differs = " ".join(plan.shortened(each) for each in overrides[place] if each not in shared)
        found.append(standing(name, differs, runs.get(place), queued.get(place), place))
    return sorted(found, key=lambda each: (STATES.index(each.state), *map(natural_order, Path(each.run).parts)))


def standing(name: str, overrides: str, run: Run | None, queued: QueuedRun | None, folder: Path) -> Standing:
    """Returns where a run stands.

    Args:
        run: as read; None if it has not started.
        queued: what was submitted to Slurm; None if it was not.
    """
    begins = run is None or (run.status == "empty" and "status" not in run.record and queued is not None)
    state, note = not_started(queued) if run is None or begins else started(run, queued)
    job = (run.job if run is not None else None) or (queued.job if queued is not None else None)
    if run is None:
        return Standing(name, str(folder), overrides, state, 0, None, None, None, note, job, None)
    steps = run.settings.get("steps")
    steps = steps if isinstance(steps, int) else None
    pace = run.seconds_per_step if state == "running" else math.nan
    left = None if steps is None or math.isnan(pace) else pace * max(steps - run.steps, 0)
    val_loss = run.last("val/loss") if "val/loss" in run.ranges else None  # NaN, if it is
    gpu_hours = None if math.isnan(run.gpu_hours) else run.gpu_hours
    return Standing(name, str(folder), overrides, state, run.steps, steps, left, val_loss, note, job, gpu_hours)


def not_started(queued: QueuedRun | None) -> tuple[str, str | None]:
    """Returns the state of a run that has not started, and what to know."""
    if queued is None or queued.state in (None, "PENDING"):
        return "queued", None if queued is None or queued.state else "there is no Slurm here to ask"
    if queued.state:
        return "running", "it has just started"
    return "failed", f"job {queued.job} has left the queue before a step: see {queued.folder / 'slurm.log'}"


def started(run: Run, queued: QueuedRun | None) -> tuple[str, str | None]:
    """Returns the state of a run that has a folder, and what to know."""
    status = run.record.get("status", "failed") if run.status == "empty" else run.status  # empty: it took no step
    waits = queued is not None and queued.state == "PENDING"
    if status == "preempted" or (status == "running" and waits):
        return "preempted", f"job {queued.job} is queued again" if queued is not None and waits else run.problem
    if status == "halted" and run.incidents:
        return "halted", f"{run.incidents[-1]['cause']}: {run.problem}"
    if status == "running" and (since := silent_since(run)) is not None:
        gone = f"; job {queued.job} is not in the queue" if queued is not None and queued.state == "" else ""
        when = datetime.fromtimestamp(since).strftime("%Y-%m-%d %H:%M")
        return "silent", f"no sign of life since {when} ({elapsed(time() - since)}){gone}"
    return status, run.problem


def silent_since(run: Run) -> float | None:
    """Returns the time, in seconds since 1970, since which a run has written nothing; None if that is not long."""
    last = last_written(run.folder)
    longest = max(run.times_between_lines()[1], default=0.0)
    return last if time() - last > max(SILENT_S, SILENT_LINES * longest) else None


def as_json(folder: Path, found: Sequence[Standing]) -> dict[str, Any]:
    """Returns what `--json` prints: `folder`, `counts` by state, and `runs`, with the fields of `Standing`."""
    counts = Counter(each.state for each in found)
    return {
        "folder": str(folder),
        "counts": {state: counts[state] for state in STATES if counts[state]},
        "runs": [asdict(each) for each in found],
    }


def lines(folder: Path, found: Sequence[Standing], rows: int) -> list[str]:
    """Returns the counts, and a line for each run.

    Args:
        rows: greatest number of runs with a line; 0 for all.
    """
    counts = Counter(each.state for each in found)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    if hours := sum(each.gpu_hours or 0 for each in found):
        parts.append(f"{hours:.3g} GPU-hours so far")
    shown = found[: rows or len(found)]
    alone = len(found) == 1  # its overrides are in run.json
    cells = [(each.state, each.run, "" if alone else each.overrides, steps_of(each), result_of(each)) for each in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    told = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    more = [f"{len(found) - len(shown):,} more runs: --rows 0 shows all"] if len(found) > len(shown) else []
    head = f"{len(found):,} run{'s' if len(found) > 1 else ''} in {folder}: {', '.join(parts)}"
    return [*map(one_line, [head, *told]), *more]


def steps_of(each: Standing) -> str:
    """Returns the steps done and planned in a few words; empty before the first one."""
    return "" if not each.step else f"step {each.step}{'' if each.steps is None else f'/{each.steps}'}"


def result_of(each: Standing) -> str:
    """Returns loss, time left and note in a few words."""
    words = [] if each.val_loss is None else [f"val loss {each.val_loss:.3f}"]
    words += [] if each.seconds_left is None else [f"{elapsed(each.seconds_left)} left"]
    return "  ".join([*words, *([each.note] if each.note else [])])


def status(folder: Path, *, rows: int, json_wanted: bool) -> None:
    """Prints where the runs at or below a folder stand.

    Raises:
        ConfigError: as `standings`; or `rows` is below 0.
    """
    if rows < 0:
        raise ConfigError(f"--rows {rows} is below 0: give the number of rows, or 0 for all")
    found = standings(folder)
    print_json(as_json(folder, found)) if json_wanted else say("\n".join(lines(folder, found, rows)))
