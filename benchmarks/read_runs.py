"""Reads the runs that `made_runs.py` writes, and prints as JSON what it read and its peak memory.

    python benchmarks/read_runs.py FOLDER

Runs as a process of its own because a process's peak memory covers its whole life. Linux only.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

from joblib.externals.loky import get_reusable_executor
from made_runs import DISTINCT, swept

from stabletrain.beside.comparison import frame_of, read_runs


def read(folder: Path) -> dict[str, Any]:
    """Returns how many runs were read, and how many of them differ from what was written."""
    found = frame_of(read_runs([folder]))
    numbers = found.run.astype(int)
    made = [swept(number) for number in numbers]
    told = zip(found["settings.optimizer.lr"], found["settings.stability"], found.seed, strict=True)
    losses = found.val_loss.groupby(numbers % DISTINCT).nunique(dropna=False)
    return {
        "runs": numbers.nunique(),
        "finished": int((found.status == "finished").sum()),
        "lines": int(found.steps.sum()),
        "misread": sum(one != other for one, other in zip(told, made, strict=True)),
        "losses": [int(losses.min()), int(losses.max()), found.val_loss.nunique()],
    }


def main() -> None:
    """Reads the runs, ends the helper processes so that their memory is counted, and prints the result."""
    found = read(Path(sys.argv[1]))
    get_reusable_executor().shutdown()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    found["own_mb"] = int(peak.split()[1]) / 1024
    found["helper_mb"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
