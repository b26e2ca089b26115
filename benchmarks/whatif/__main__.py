"""`python -m benchmarks.whatif record|clean|score`: see docs/whatif.md.

record --processes 2      runs the cases that have no recording yet, in their order; may be stopped and started again
clean --processes 2       the same for ordinary runs
score                     prints the tables of docs/whatif.md
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.foresight.runs import one_thread
from benchmarks.whatif.cases import Case, all_cases, clean_cases

RECORDINGS = Path(__file__).parent / "recordings"
CASES, CLEAN = RECORDINGS / "cases.jsonl", RECORDINGS / "clean.jsonl"


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whatif", description=__doc__)
    parser.add_argument("command", choices=["record", "clean", "score"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="no further case is begun after this time")
    given = parser.parse_args(arguments)
    if given.command == "score":
        from benchmarks.whatif.score import results

        print(results(read(CASES), read(CLEAN)))
        return 0
    clean = given.command == "clean"
    cases, file = (clean_cases(), CLEAN) if clean else (all_cases(), CASES)
    return run_all(cases, file, given.processes, given.minutes)


def run_all(cases: Sequence[Case], file: Path, processes: int, minutes: float) -> int:
    """Runs the cases that have no recording, and appends what was found; returns 1 if one failed."""
    done = {found["case"] for found in read(file)}
    missing = [case for case in cases if case.name not in done]
    end, failed = time.time() + 60 * minutes, 0
    file.parent.mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=8) as pool, file.open("a") as lines:
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
    """Runs a case in a worker; returns its name, and what was found, the error, or nothing after the end of the time."""
    case, end = task
    if time.time() > end:
        return case.name, ""
    one_thread()
    from benchmarks.whatif.record import record, record_clean

    try:
        return case.name, record(case) if case.drawn.grid else record_clean(case)
    except Exception as error:  # one case must not end the campaign
        return case.name, f"{type(error).__name__}: {error}"[:300]


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the recordings of a file, in the order of their names."""
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted(map(json.loads, lines), key=lambda found: found["case"])


if __name__ == "__main__":
    sys.exit(main())
