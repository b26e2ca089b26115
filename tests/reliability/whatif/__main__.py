"""`python -m tests.reliability.whatif [record|clean|pack|score|heal]`: see docs/evidence/whatif.md.

record --processes 2      runs the cases that have no recording in outputs/whatif, in their order: about 70 minutes;
                          may be stopped and started again
clean --processes 2       the same for ordinary runs
pack                      compresses the recordings of outputs/whatif, to be committed
score [--from FOLDER]     prints the tables of docs/evidence/whatif.md (default)
heal CASE ...             runs only the run of each case that heals itself, and prints how it ends
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.reliability.whatif.cases import all_cases, clean_cases
from tests.reliability.whatif.record import trained
from tests.reliability.whatif.runs import pack, read, run_all

WORK, COMMITTED = Path("outputs/whatif"), Path(__file__).parent / "recordings"
CASES, CLEAN = "cases.jsonl", "clean.jsonl"


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.whatif", description=__doc__)
    parser.add_argument("command", nargs="?", default="score", choices=["record", "clean", "pack", "score", "heal"])
    parser.add_argument("cases", nargs="*", help="such as muon/2, for heal")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="no further case is begun after this time")
    parser.add_argument("--from", dest="source", type=Path, default=COMMITTED, help="folder of the recordings to score")
    given = parser.parse_args(arguments)
    if given.command == "score":
        from tests.reliability.whatif.score import results

        print(results(read(given.source / CASES), read(given.source / CLEAN)))
        return 0
    if given.command == "pack":
        for name in (CASES, CLEAN):
            pack(WORK / name, COMMITTED)
        return 0
    if given.command == "heal":
        for case in (case for case in all_cases() if case.name in given.cases):
            with tempfile.TemporaryDirectory() as place:
                run = trained((*case.overrides, "guard.escalate=whatif"), Path(place) / "run")
            arms = ", ".join(heal["arm"] or heal["why"] for heal in run["heals"])
            print(
                f"| {case.name} | {run['status']} | {run['val']} | {'diverged' * run['diverged']} | {arms} |",
                flush=True,
            )
        return 0
    clean = given.command == "clean"
    cases, file = (clean_cases(), CLEAN) if clean else (all_cases(), CASES)
    return run_all(cases, WORK / file, given.processes, given.minutes)


if __name__ == "__main__":
    sys.exit(main())
