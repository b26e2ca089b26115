"""Records cases in several processes; a case that has a recording is not run again."""

import multiprocessing
import os
import time
from pathlib import Path

from tests.reliability.foresight.cases import Case, all_cases
from tests.reliability.foresight.store import COMMITTED, file_of, read, write


def record_all(folder: Path, processes: int, only: tuple[str, ...]) -> int:
    """Trains the missing cases."""
    packed = {recording["case"] for recording in read(COMMITTED)}
    missing = [
        case
        for case in all_cases()
        if case.name.startswith(only) and case.name not in packed and not file_of(folder, case.name).exists()
    ]
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
    one_thread()
    from tests.reliability.foresight.record import record

    case, folder = task
    try:
        write(folder, record(case))
    except Exception as error:  # one case must not end the campaign
        return case.name, f"{type(error).__name__}: {error}"[:300]
    return case.name, None


def one_thread() -> None:
    """Limits this process to one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
