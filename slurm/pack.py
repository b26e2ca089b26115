"""Several runs side by side on one device: what a task of `slurm/launch.sh --pack` starts in place of train.py.

    pack.py PYTHON TRAIN.PY OPTIONS... -- FOLDER OVERRIDES... -- FOLDER OVERRIDES...

Each run has its own process, run folder and slurm.log. If one fails, the others go on.

Slurm sends a signal to every process of the task, so each run gets it by itself and saves. This process waits for all
of them, and ends with the code by which job.sh decides whether to queue the task again.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SAVED, WRONG_CARD = 75, 4

CODES = {"finished": 0, "failed": 1, "halted": 3}
"""Exit codes of runs that are over, by their status. What they are is said in `stabletrain/cli/train.py`."""


def parts(words: Iterable[str]) -> list[list[str]]:
    """Splits the words at each `--`."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return found


def ended_before(folder: Path, environment: Mapping[str, str]) -> int | None:
    """Returns the code of a run that was over at an earlier start of this job; None if it is to be started.

    The first start of a job starts each run, so that submitting again tries a failed one again.
    """
    if environment.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    try:
        record: dict[str, Any] = json.loads((folder / "run.json").read_text())
        return record.get("exit_code", CODES.get(record["status"]))
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def code_of(codes: Iterable[int]) -> int:
    """Returns the code of the task: what lets it queue again comes first, then what went wrong.

    These are in order: a run has saved, SIGTERM has ended one, a signal has killed one, the card is the wrong one.
    """
    known = {code if code >= 0 else 128 - code for code in codes}
    killed = max((code for code in known if code > 128), default=0)
    for code in (SAVED, 128 + signal.SIGTERM, killed, WRONG_CARD):
        if code and code in known:
            return code
    return max(known, default=0)


def main(words: list[str]) -> int:
    """Runs all of them; returns the exit code of the task."""
    command, *runs = parts(words)
    # The runs begin with USR2 ignored, as job.sh has it, until they handle it. SIGTERM must not end this process.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    codes: dict[str, int] = {}
    started: dict[str, subprocess.Popen[bytes]] = {}
    for folder, *overrides in runs:
        before = ended_before(Path(folder), os.environ)
        if before is not None:
            codes[folder] = before
            continue
        with (Path(folder) / "slurm.log").open("ab") as log:
            started[folder] = subprocess.Popen(
                [*command, *overrides, f"hydra.run.dir='{folder}'", "resume=auto"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "STABLETRAIN_PACKED": str(len(runs))},
            )
    for folder, process in started.items():
        codes[folder] = process.wait()
    for folder, code in codes.items():
        print(f"slurm    {folder}: code {code}{'' if folder in started else ', at an earlier start'}", flush=True)
    return code_of(codes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
