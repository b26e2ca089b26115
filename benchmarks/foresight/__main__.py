"""`python -m benchmarks.foresight record|pack`: see docs/foresight.md.

record --processes 2      trains all cases that have no recording yet; may be stopped and started again
pack                      compresses the recordings, to be committed
"""

import argparse
import sys
from pathlib import Path

from benchmarks.foresight.runs import record_all
from benchmarks.foresight.store import COMMITTED, pack, read

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


if __name__ == "__main__":
    sys.exit(main())
