"""Which recordings are missing, and the processes that make them."""

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.reliability.finite import cases, store
from tests.reliability.finite.cases import Case
from tests.reliability.finite.record import crashed, record
from tests.reliability.finite.replay import replayed
from tests.reliability.finite.score import scored, setting, told

WORK = Path("outputs/finite")
PARTS = ("partner", "faulty", "clean", "act")


def planned(part: str, found: Sequence[dict]) -> list[Case]:
    """Returns the runs of a part; ways back are run only where something was seen, since all else stays the same.

    Of faults that cost nothing, the first seed's are enough.
    """
    if part == "partner":
        return cases.partners()
    if part == "faulty":
        return cases.faulty()
    if part == "clean":
        return cases.clean()
    found = [*replayed(found)]
    costly = {(run.kind, run.setting) for run in scored(found) if run.costly}
    seen = {
        one["name"].replace("/alarm", "/act")
        for one in found
        if one["part"] == "faulty"
        and told(one)
        and (one["seed"] == cases.SEEDS[0] or (one["kind"], setting(one)) in costly)
    }
    return [case for case in cases.faulty("act") if case.name in seen]


def run_one(case: Case) -> dict:
    """Records one case; an error becomes a recording too."""
    torch.set_num_threads(1)
    try:
        return record(case)
    except Exception as error:
        return crashed(case, error)


def record_parts(parts: Sequence[str], into: Path, processes: int, limit: int | None, only: str) -> int:
    """Records what has no recording in `into` yet; returns the number of runs that crashed."""
    failed = 0
    for part in parts:
        found = [*store.read(into)] if into.exists() else []
        done = {one["name"] for one in found if one["status"] != "crashed"}
        todo = [case for case in planned(part, found) if case.name not in done and only in case.name][:limit]
        began = time.monotonic()
        with recordings(todo, processes) as made:
            for number, one in enumerate(made, 1):
                store.append(into, one)
                failed += one["status"] == "crashed"
                left = (time.monotonic() - began) / number * (len(todo) - number)
                said = ", ".join(sorted({f"{event[1]} {event[2]}" for event in one["events"]})) or "silent"
                text = f"{number}/{len(todo)} {one['name']} {one['status']} {one['final']:.4f} {said}"
                print(f"{text}; {left / 60:.0f} min left", one["reason"] or "", file=sys.stderr, flush=True)
    return failed


@contextlib.contextmanager
def recordings(todo: Sequence[Case], processes: int) -> Iterator[Iterator[dict]]:
    """Context that yields the recordings as they are made, in this process or in several."""
    if processes == 1:
        yield map(run_one, todo)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield pool.imap(run_one, todo)
