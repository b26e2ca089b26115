"""`python -m benchmarks.foresight record|pack`: see docs/foresight.md.

record --processes 2      trains all cases that have no recording yet; may be stopped and started again
pack                      compresses the recordings, to be committed
"""

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

from benchmarks.foresight.cases import Case, all_cases
from benchmarks.foresight.store import COMMITTED, file_of, pack, read, write

FOLDER = Path("outputs") / "foresight"


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foresight", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train the cases that have no recording")
    recording.add_argument("--processes", type=int, default=1)
    recording.add_argument("--only", default="", help="beginnings of case names, separated by commas")
    for command in (recording, commands.add_parser("pack", help="compress the recordings")):
        command.add_argument("--folder", type=Path, default=FOLDER, help="of the recordings that are not packed")
    given = parser.parse_args(arguments)
    if given.command == "record":
        return record_all(given.folder, given.processes, tuple(given.only.split(",")))
    for file in pack(read(given.folder), COMMITTED):
        print(f"{file.name}: {file.stat().st_size / 2**20:.2f} MiB")
    return 0


def record_all(folder: Path, processes: int, only: tuple[str, ...]) -> int:
    """Trains the missing cases."""
    missing = [case for case in all_cases() if case.name.startswith(only) and not file_of(folder, case.name).exists()]
    began, failed = time.time(), []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        done = pool.imap_unordered(record_one, [(case, folder) for case in missing])
        for number, (name, error) in enumerate(done, 1):
            left = (time.time() - began) / number * (len(missing) - number)
            print(f"{number}/{len(missing)} {name} {error or ''} ({left / 60:.0f} minutes left)", flush=True)
            failed += [name] if error else []
    return 1 if failed else 0


def record_one(task: tuple[Case, Path]) -> tuple[str, str | None]:
    """Trains one case and writes its recording; returns its name, and the error if there was one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from benchmarks.foresight.record import record

    torch.set_num_threads(1)
    case, folder = task
    try:
        write(folder, record(case))
    except Exception as error:  # one case must not end the campaign
        return case.name, f"{type(error).__name__}: {error}"[:300]
    return case.name, None


if __name__ == "__main__":
    sys.exit(main())
