"""Runs cases in several processes; a case that has a recording is not run again."""

import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.reliability.foresight.runs import one_thread
from tests.reliability.whatif.cases import Case


def run_all(cases: Sequence[Case], file: Path, processes: int, minutes: float) -> int:
    """Runs the cases that have no recording, and appends what was found; returns 1 if one failed."""
    done = {found["case"] for found in read(file)}
    missing = [case for case in cases if case.name not in done]
    end, failed = time.time() + 60 * minutes, 0
    file.parent.mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=12) as pool, file.open("a") as lines:
        tasks = ((case, end) for case in missing)
        for number, (name, found) in enumerate(pool.imap_unordered(run_one, tasks), 1):
            if isinstance(found, dict):
                lines.write(json.dumps(found) + "\n")
                lines.flush()
            elif found:
                failed += 1
            print(f"{number}/{len(missing)} {name} {found if isinstance(found, str) else ''}", flush=True)
    return 1 if failed else 0


def run_one(task: tuple[Case, float]) -> tuple[str, dict[str, Any] | str]:
    """Runs a case in a worker; returns its name, and what was found, the error, or nothing if the time is over."""
    case, end = task
    if time.time() > end:
        return case.name, ""
    one_thread()
    from tests.reliability.whatif.record import record, record_clean

    try:
        return case.name, record(case) if case.drawn.grid else record_clean(case)
    except Exception as error:  # one case must not end the campaign
        return case.name, f"{type(error).__name__}: {error}"[:300]


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the recordings of a file, in the order of their names."""
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted(map(json.loads, lines), key=lambda found: found["case"])
