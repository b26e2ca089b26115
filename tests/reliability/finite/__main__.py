"""`python -m tests.reliability.finite`: see the package."""

import argparse
import sys
from pathlib import Path

from tests.reliability.finite import score, store
from tests.reliability.finite.replay import replayed
from tests.reliability.finite.runs import PARTS, WORK, record_parts


def main() -> int:
    """Records, packs or scores."""
    parser = argparse.ArgumentParser(description="The campaign of finite faults.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="run what has no recording yet: all take 2.2 hours of CPU time")
    one.add_argument("--part", choices=[*PARTS, "all"], default="all")
    one.add_argument("--into", type=Path, default=WORK)
    one.add_argument("--processes", type=int, default=1)
    one.add_argument("--limit", type=int, help="at most this many runs of each part")
    one.add_argument("--only", default="", help="runs whose name contains this, such as gpt/fp32/0")
    one = commands.add_parser("pack", help="judge recordings again and compress what the tables need, to be committed")
    one.add_argument("--from", dest="source", type=Path, default=WORK)
    one.add_argument("--into", type=Path, default=store.COMMITTED)
    one = commands.add_parser("score", help="tables from recordings")
    one.add_argument("--from", dest="source", type=Path, default=store.COMMITTED)
    chosen = parser.parse_args()
    if chosen.command == "record":
        parts = PARTS if chosen.part == "all" else [chosen.part]
        return 1 if record_parts(parts, chosen.into, chosen.processes, chosen.limit, chosen.only) else 0
    if chosen.command == "pack":
        for file in store.pack(replayed(store.read(chosen.source)), chosen.into):
            print(f"{file} {file.stat().st_size / 1e6:.2f} MB")
        return 0
    print(score.report([*replayed(store.read(chosen.source))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
