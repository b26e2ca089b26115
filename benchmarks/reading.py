"""The time and memory to read many runs for a comparison.

    python benchmarks/reading.py --rounds 3

The runs are written without training: folders whose metrics are hard links to 24 files, which stay in the page cache.
Each round reads them in a new process, with as many helper processes as there are cores. Prints median and quartiles
over
the rounds: wall-clock time, CPU time (user and system) of all processes together, and the peak memory of the reading
process and of the largest helper. Linux only.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from made_runs import sweep
from measuring import command_line, head, machine, save
from quantities import COLUMNS, quantity, show

HERE = Path(__file__).parent


def read(folder: Path) -> dict[str, Any]:
    """Returns what `read_runs.py` prints, with the seconds that it took."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, str(HERE / "read_runs.py"), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout), "wall": wall, "cpu": cpu}


def main() -> None:
    """Writes the runs, measures, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 3)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--lines", type=int, default=1_000, help="steps per run")
    asked = parser.parse_args()
    cpu = torch.device("cpu")
    print(machine(cpu))
    print(head(*COLUMNS))
    with tempfile.TemporaryDirectory() as place:
        sweep(Path(place) / "sweep", asked.runs, asked.lines)
        rounds = [read(Path(place) / "sweep") for _ in range(asked.rounds)]
    where = f"{asked.runs:,} runs of {asked.lines:,} lines"
    kinds = {"wall": ("wall time", "s"), "cpu": ("user + sys", "s")}
    kinds |= {"own_mb": ("peak memory", "MB"), "helper_mb": ("peak memory of a helper", "MB")}
    results = [quantity(where, what, [one[key] for one in rounds], unit) for key, (what, unit) in kinds.items()]
    save(asked.json, cpu, show(results))


if __name__ == "__main__":
    main()
