"""Runs the healthy programs and prints a table: steps, withheld steps, and alarms by kind."""

import argparse
import logging
import sys
import time

from tests.reliability.finite.score import table
from tests.reliability.healthy.run import PROGRAMS, run


def main() -> None:
    """Runs the programs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=[*PROGRAMS], help="programs (default: all)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--steps", type=int, default=600, help="number of steps, of all networks together")
    parser.add_argument("--attached", action="store_true", help="attach the guards to loops that step by themselves")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)  # the guard's lines
    rows = []
    for name in asked.only:
        for seed in range(asked.seeds):
            began = time.process_time()
            found = run(name, asked.steps, seed, asked.attached)
            alarms = ", ".join(f"{kind} {count}" for kind, count in sorted(found.alarms.items()))
            withheld = f"{found.withheld}{' (halted)' if found.halted else ''}"
            rows.append([name, str(seed), str(found.steps), withheld, alarms, f"{time.process_time() - began:.1f}"])
            print(name, seed, file=sys.stderr)
    print(table(("program", "seed", "steps", "withheld", "alarms", "CPU seconds"), rows))


if __name__ == "__main__":
    main()
