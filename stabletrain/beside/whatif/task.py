"""One task of an array job: `python -m stabletrain.beside.whatif.task <file>` runs the arm that the file describes.

The file is JSON. With the same number of threads an arm has the same bits as in the process that wrote the file.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from stabletrain.beside.whatif.arm_run import ArmRun, run_in_process
from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.base import BaseRun
from stabletrain.config.arguments import Arguments
from stabletrain.config.resuming import Settings
from stabletrain.stored.json_files import read_record
from stabletrain.tracking.metrics import replace


class ArmRunRecord(TypedDict):
    """The content of the file: the fields of an `ArmRun`, and the number of threads."""

    base: dict[str, Any]
    arm: dict[str, Any]
    start: str
    folder: str
    stop: int
    threads: int


def write_arm_run(run: ArmRun, threads: int, file: Path) -> None:
    """Writes an arm and its number of threads to a file."""
    replace(file, json.dumps({**asdict(run), "threads": threads}, default=os.fspath, indent=2) + "\n")


def read_arm_run(file: Path) -> tuple[ArmRun, int]:
    """Reads an arm and its number of threads.

    Raises:
        DamagedFile: the file is missing, or does not hold them.
    """
    found: dict[str, Any] = dict(read_record(file, ArmRunRecord))
    threads = found.pop("threads")
    # Every field goes back to where it came from, also those that an arm may get later.
    base: dict[str, Any] = {**found["base"], "run": Path(found["base"]["run"])}
    base |= {"arguments": Arguments(*base["arguments"]), "settings": Settings(*base["settings"])}
    base["changes"] = tuple(base["changes"])
    arm: dict[str, Any] = {**found["arm"]}
    arm |= {name: tuple(arm[name]) for name in ("overrides", "states")}
    found |= {
        "base": BaseRun(**base),
        "arm": Arm(**arm),
        "start": Path(found["start"]),
        "folder": Path(found["folder"]),
    }
    return ArmRun(**found), threads


if __name__ == "__main__":
    run_in_process(*read_arm_run(Path(sys.argv[1])))
