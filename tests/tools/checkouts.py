"""Runs two checkouts of the project on this machine, and compares everything that must not change between them.

    python tests/tools/checkouts.py main                    a revision with this checkout
    python tests/tools/checkouts.py OLD NEW                 folders, or revisions of this repository
    python tests/tools/checkouts.py main --only rollback --keep /tmp/rollback

Each of some 190 cases runs a few commands in its own folder: models, precisions, clippings, optimizers, guards, faults,
rollbacks, resumes, two ranks, sweeps, plug-ins, the `stabletrain` command, `--help`, and mistakes. The script compares
exit codes, output, and every file of the run folders, weights and moments bit by bit. `checkouts_masks.py` defines what
is masked. Both checkouts run in the same folder, one after the other, so that their paths are equal. The script imports
nothing from either, and compares nothing with files stored in the repository.

Prints a line with the first difference for each case that differs (with -v a line for every case), and exits with code
1 if any case differs. Takes 12 minutes of CPU time, shared by two cores.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from checkouts_cases import CASES, Case
from checkouts_inputs import write_inputs
from checkouts_masks import difference
from checkouts_runs import ENVIRONMENT, Broken, Checkout, copied, load, slug

REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> int:
    """Compares two checkouts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="a folder, or a git revision of this repository")
    parser.add_argument("new", nargs="?", default=str(REPOSITORY), help="the same (default: this checkout)")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="cases whose names contain this")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what both leave in this folder")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cases at the same time")
    parser.add_argument("-v", "--verbose", action="store_true", help="print a line for every case")
    chosen = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if not chosen.only or any(part in name for part in chosen.only)}
    if not cases:
        parser.error(f"no case's name contains {' or '.join(chosen.only)}")
    if chosen.keep and chosen.keep.exists():
        parser.error(f"--keep {chosen.keep} exists already")
    place = chosen.keep or Path(tempfile.mkdtemp(prefix="checkouts-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        return compare(place.resolve(), chosen.old, chosen.new, cases, chosen.jobs, chosen.verbose)
    except Broken as error:
        print(f"checkouts.py: {error}", file=sys.stderr)
        return 2
    finally:
        if not chosen.keep:
            shutil.rmtree(place, ignore_errors=True)


def compare(place: Path, old: str, new: str, cases: Mapping[str, Case], jobs: int, verbose: bool) -> int:
    """Runs the cases in both checkouts and prints what differs; returns 1 if anything does."""
    began = time.monotonic()
    load()
    different, broken = [], []

    def first(name: str) -> None:
        if reason := unexpected(cases[name], place / "runs" / slug(name)):
            broken.append(name)
            print(f"BROKEN     {name}: {reason}", flush=True)

    def second(name: str) -> None:
        found = difference(place / "old" / slug(name), place / "runs" / slug(name))
        different.extend([name] if found else [])
        if found or verbose:
            print(f"{'DIFFERENT  ' if found else 'same       '}{name}{f': {found}' if found else ''}", flush=True)

    for source, label, done in ((old, "old", first), (new, "new", second)):
        print(f"{label}        {copied(source, REPOSITORY, place / 'checkout')}", flush=True)
        (place / "runs").mkdir()
        write_inputs(place / "runs")
        Checkout(place / "checkout", place / "runs").run(cases, jobs, done)
        (place / "runs").rename(place / label)
        (place / "checkout").rename(place / f"{label}-checkout")
    same = len(cases) - len(different)
    print(
        f"{len(cases)} cases: {same} same, {len(different)} different, {len(broken)} broken in the old checkout;",
        end=" ",
    )
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if different or broken else 0


def unexpected(case: Case, folder: Path) -> str:
    """Returns how a case failed in the old checkout, which would make a comparison meaningless; empty if it did not
    fail.
    """
    for number, command in enumerate(case.commands, 1):
        name = f"{number}.{command.program}"
        code = int((folder / f"{name}.code").read_text())
        if code != command.code:
            errors = (folder / f"{name}.err").read_text().strip().splitlines()
            return f"command {number} ends with code {code}, not {command.code}: {errors[-1] if errors else ''}"
    names = ("*.out", "*.err", "events.jsonl", "output.txt")
    texts = "".join(file.read_text(errors="replace") for name in names for file in folder.rglob(name))
    missing = [text for text in case.shows if text not in texts]
    return f"{missing[0]!r} is in no output and no event" if missing else ""


if __name__ == "__main__":
    if not ENVIRONMENT.items() <= os.environ.items():  # only read when Python and its libraries start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    sys.exit(main())
