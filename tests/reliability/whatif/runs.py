"""Runs cases in several processes; a case that has a recording is not run again."""

import json
import lzma
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.reliability.foresight.runs import one_thread
from tests.reliability.whatif.cases import Case


def run_all(cases: Sequence[Case], file: Path, processes: int, minutes: float) -> int:
    """Runs the cases that have no recording, and appends what was found; returns 1 if one failed."""
    done = {found["case"] for found in read(file)}
    missing = [case for case in cases if case.name not in done]
    end, failed = time.time() + 60 * minutes, 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=12) as pool, file.open("a") as lines:
        tasks = ((case, end) for case in missing)
        for number, (name, found) in enumerate(pool.imap_unordered(run_one, tasks), 1):
            if isinstance(found, dict):
                lines.write(json.dumps(found) + "\n")
                lines.flush()
            elif found:
                failed += 1
            print(f"{number}/{len(missing)} {name} {found if isinstance(found, str) else ''}", flush=True)
    return 1 if failed else 0


def run_one(task: tuple[Case, float]) -> tuple[str, dict[str, Any] | str]:
    """Runs a case in a worker; returns its name, and what was found, the error, or nothing if the time is over."""
    case, end = task
    if time.time() > end:
        return case.name, ""
    one_thread()
    from tests.reliability.whatif.record import record, record_clean

    try:
        return case.name, record(case) if case.drawn.grid else record_clean(case)
    except Exception as error:  # one case must not end the campaign
        return case.name, f"{type(error).__name__}: {error}"[:300]


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the recordings of a file, or of the compressed one beside it, in the order of their names."""
    packed = packed_file(file.parent, file)
    text = (
        file.read_text() if file.exists() else lzma.decompress(packed.read_bytes()).decode() if packed.exists() else ""
    )
    return sorted(map(json.loads, text.splitlines()), key=lambda found: found["case"])


def pack(file: Path, folder: Path) -> None:
    """Writes the recordings of a file compressed into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(found) + "\n" for found in read(file))
    packed_file(folder, file).write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def packed_file(folder: Path, file: Path) -> Path:
    """Returns where the compressed recordings of a file lie in a folder."""
    return folder / f"{file.name}.xz"
