"""Which recordings are missing, and the processes that make them."""

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.reliability.finite import cases, store
from benchmarks.reliability.finite.cases import Case
from benchmarks.reliability.finite.record import record

WORK = Path("outputs/finite")
PARTS = ("partner", "faulty", "clean", "act")


def planned(part: str, found: Sequence[dict]) -> list[Case]:
    """Returns the runs of a part; ways back are run only where something was seen, since all else stays the same."""
    if part == "partner":
        return cases.partners()
    if part == "faulty":
        return cases.faulty()
    if part == "clean":
        return cases.clean()
    seen = {one["name"].replace("/alarm", "/act") for one in found if one["part"] == "faulty" and one["events"]}
    return [case for case in cases.faulty("act") if case.name in seen]


def run_one(case: Case) -> dict:
    """Records one case; an error becomes a recording too."""
    torch.set_num_threads(1)
    try:
        return record(case)
    except Exception as error:
        return {
            "name": case.name,
            "part": case.part,
            "model": case.model,
            "precision": case.precision,
            "seed": case.seed,
            "kind": case.kind,
            "mode": case.mode,
            "extra": list(case.extra),
            "status": "crashed",
            "reason": f"{type(error).__name__}: {error}",
            "final": float("nan"),
            "val": [],
            "events": [],
            "digest": "",
            "seconds": 0.0,
            "series": {},
        }


def record_parts(parts: Sequence[str], into: Path, processes: int, limit: int | None, only: str) -> int:
    """Records what has no recording in `into` yet; returns the number of runs that crashed."""
    crashed = 0
    for part in parts:
        found = [*store.read(into)] if into.exists() else []
        done = {one["name"] for one in found}
        todo = [case for case in planned(part, found) if case.name not in done and only in case.name][:limit]
        began = time.monotonic()
        with recordings(todo, processes) as made:
            for number, one in enumerate(made, 1):
                store.append(into, one)
                crashed += one["status"] == "crashed"
                left = (time.monotonic() - began) / number * (len(todo) - number)
                said = ", ".join(sorted({f"{event[1]} {event[2]}" for event in one["events"]})) or "silent"
                final = f"{one['final']:.4f} {one['seconds']:.1f}s"
                text = f"{part} {number}/{len(todo)} {one['name']} {one['status']} {final} {said}; {left / 60:.0f} min left"
                print(text, one["reason"] or "", file=sys.stderr, flush=True)
    return crashed


@contextlib.contextmanager
def recordings(todo: Sequence[Case], processes: int) -> Iterator[Iterator[dict]]:
    """Context that yields the recordings as they are made, in this process or in several."""
    if processes == 1:
        yield map(run_one, todo)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield pool.imap(run_one, todo)
