"""The lines that a sweep prints: one when it starts, one when each run ends, and a summary at the end.

3/24  precision=fp32 stability=qknorm seed=0  finished  val loss 2.311  14 s  4:51 left
"""

import math
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stabletrain.beside.sweep.plan import Sweep
from stabletrain.cli.finished import FINAL_STATUSES, loss_of, result
from stabletrain.errors import TrainingHalted
from stabletrain.program import program_name
from stabletrain.tracking.progress import elapsed

INTERRUPTED_EXIT_CODE = 75
"""Exit code of an interrupted sweep: EX_TEMPFAIL of sysexits.h, "try again later"."""

OVERRIDES_WIDTH = 60
"""Columns reserved for the overrides that vary; longer ones push the rest of the line to the right."""


def opening(sweep: Sweep) -> str:
    """Returns the first line: the number of runs, the folder, and how many runs are done already."""
    over = sum(record.get("status") in FINAL_STATUSES for _, record in sweep.records())
    count = "" if sweep.count is None else f"{sweep.count} runs "
    return f"sweep    {count}in {sweep.folder}{f', {over} already done' if over else ''}"


def label(sweep: Sweep | None, number: int, overrides: Sequence[str]) -> str:
    """Returns the run's number, the number of runs, and the overrides that only this run has."""
    if sweep is None:
        return f"{number + 1}  {' '.join(overrides)}"
    count = sweep.count or 0
    wide = max((len(sweep.varied(run)) for run in sweep.runs or []), default=0)
    of = f"{number + 1:>{len(str(count))}}/{count}" if count else f"{number + 1}"
    return f"{of}  {sweep.varied(overrides):<{min(wide, OVERRIDES_WIDTH)}}"


def ending(
    sweep: Sweep | None, number: int, overrides: Sequence[str], record: Mapping[str, Any], seconds: float | None
) -> str:
    """Returns the line printed when a run ends.

    Args:
        sweep: the run's sweep; None if there is no record of one.
        number: the run's index, from 0.
        overrides: the run's overrides.
        record: its `run.json`.
        seconds: its duration; None if the run ended before this start of the sweep.
    """
    words = [label(sweep, number, overrides), f"{record.get('status', 'failed'):<9}", result(record)]
    if seconds is None:
        return "  ".join([*words, "(before)"])
    words.append(f"{elapsed(seconds) if seconds >= 60 else f'{seconds:.0f} s'}")
    if record.get("status") != "finished":
        words.append(" ".join(str(record.get("reason")).split())[:100])
    elif sweep is not None and (left := seconds_left(sweep)) is not None:
        words.append(f"{elapsed(left)} left")
    return "  ".join(words)


def seconds_left(sweep: Sweep) -> float | None:
    """Estimates the seconds until all runs have ended, from the pace of this start; None if no estimate is possible."""
    over = [file for file in sweep.record_files() if file.stat().st_mtime >= sweep.began]
    records = [record for _, record in sweep.records()]
    left = (sweep.count or 0) - sum(record.get("status") in (*FINAL_STATUSES, "failed") for record in records)
    done = len(over) - sum(record.get("status") == "running" for record in records)
    return (time.time() - sweep.began) / done * left if done > 0 and left > 0 else None


def closing(sweep: Sweep) -> str:
    """Returns the summary: how many runs ended in which status, the best run, the runs that did not finish, what to
    type next.
    """
    records = sweep.records()
    ends = Counter(str(record.get("status")) for _, record in records)
    missing = (sweep.count or 0) - len(records)
    parts = [f"{count} {status}" for status, count in ends.most_common()]
    parts += [f"{missing} not started"] if missing > 0 else []
    lines = [f"sweep    {sweep.count or len(records)} runs, {', '.join(parts)}, in {sweep.folder}"]
    best = min(records, key=lambda named: loss_of(named[1]), default=("", {}))
    if len(records) > 1 and math.isfinite(loss_of(best[1])):
        varied = sweep.varied(best[1].get("overrides", []))
        # Of runs with several seeds, the lowest loss says little about its setting: `compare` has the means.
        word = "lowest" if any(each.startswith("seed=") for each in varied.split()) else "best"
        lines.append(f"{word:<8} val loss {loss_of(best[1]):.3f}  {varied}  {sweep.folder / best[0]}")
    for name, record in records:
        if record.get("status") not in ("finished", "running"):
            reason = " ".join(str(record.get("reason")).split())[:100]
            varied = sweep.varied(record.get("overrides", []))
            lines.append(f"{record.get('status'):<8} {varied}  {sweep.folder / name}  {reason}")
    folder = shlex.quote(str(sweep.folder))
    if missing > 0 or any(ends[status] for status in ("failed", "preempted", "running", "broken")):
        lines.append(f"then     {program_name()} resume={folder} runs what is missing or failed")
    if len(records) > 1:
        lines.append(f"next     stabletrain compare {folder}")
    return "\n".join(lines)


def code(sweep: Sweep) -> int:
    """Returns the sweep's exit code: that of the first run that did not finish."""
    codes = {"halted": TrainingHalted.exit_code, "failed": 1, "broken": 1, "preempted": INTERRUPTED_EXIT_CODE}
    for _, record in sweep.records():
        if (status := record.get("status")) in codes:
            return int(record.get("exit_code", codes[status]))
    return INTERRUPTED_EXIT_CODE if sweep.runs is not None and len(sweep.records()) < len(sweep.runs) else 0
