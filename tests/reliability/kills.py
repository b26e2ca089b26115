"""Kills a real run with SIGKILL at random moments, resumes it each time, and compares its end with an uninterrupted
run's.

    python -m tests.reliability.kills --kills 30

The moments are uniform over the run's duration. Checkpoints are written every other step, so some kills fall into a
checkpoint's writing; the report counts them.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from stabletrain.tracking.metrics import read_jsonl
from tests import forkserver
from tests.reliability.ends import difference
from tests.runs import ROOT, TINY_GPT

STEPS = 300
RUN = [
    *TINY_GPT,
    "model.n_embd=64",
    "model.dropout=0.1",
    "checkpoint.every=2",
    "eval_every=40",
    "log_every=1",
]


@dataclass
class Report:
    """The result of a campaign.

    Attributes:
        runs: number of runs, each killed several times.
        kills: processes killed.
        inside_write: kills while a checkpoint was half-written.
        resumed_from: the steps at which runs resumed.
        identical: whether every run's end is bit-identical to the uninterrupted run's.
        difference: the first difference, if any.
    """

    runs: int = 0
    kills: int = 0
    inside_write: int = 0
    resumed_from: list[int] = field(default_factory=list)
    identical: bool = False
    difference: str = ""


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    """Starts `python train.py` in its own process."""
    return subprocess.Popen(
        [forkserver.python(), str(ROOT / "train.py"), *RUN, f"hydra.run.dir={folder}", *overrides],
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> None:
    """Waits for a run that is not killed."""
    _, errors = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(errors)


def training(folder: Path, process: subprocess.Popen, since: float) -> None:
    """Waits until this process has written to the run's metrics, or has ended."""
    file = folder / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and file.stat().st_size and file.stat().st_mtime > since):
        time.sleep(0.002)


def status(folder: Path) -> str:
    """Returns the status in `run.json`; empty if there is none."""
    file = folder / "run.json"
    return json.loads(file.read_text())["status"] if file.exists() else ""


def campaign(place: Path, kills: int, seed: int, steps: int = STEPS) -> Report:
    """Kills runs at random moments, `kills` times in all; compares each run's end with an uninterrupted one's."""
    length = f"steps={steps}"
    draw, report = random.Random(seed), Report()
    whole = place / "whole"
    place.mkdir(parents=True, exist_ok=True)
    since = time.time()
    process = start(whole, length)
    training(whole, process, since)
    duration = -time.monotonic()
    finish(process)
    duration += time.monotonic()
    while report.kills < kills:
        cut = place / f"cut{report.runs}"
        report.runs += 1
        while report.kills < kills and status(cut) != "finished":
            since = time.time()
            process = start(cut, length, "resume=auto")
            training(cut, process, since)
            time.sleep(draw.uniform(0, duration / 4))  # a quarter, so that each run is killed several times
            if process.poll() is None:
                killed = forkserver.command_of(process.pid)
                os.kill(killed, signal.SIGKILL)
                report.kills += 1
                report.inside_write += any((cut / "checkpoints").glob(f".step-*{killed}"))
            process.communicate()
        finish(start(cut, length, "resume=auto"))
        report.resumed_from += resumed(cut)
        if found := difference(whole, cut):
            report.difference = f"{cut.name}: {found}"
            return report
    report.identical = True
    return report


def resumed(folder: Path) -> list[int]:
    """Returns the steps at which the run was resumed so far."""
    file = folder / "events.jsonl"
    return [e["step"] for e in read_jsonl(file) if e["event"] == "resume"] if file.exists() else []


def main() -> int:
    """Runs a campaign and prints its report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        report = campaign(Path(place), chosen.kills, chosen.seed)
    print(json.dumps(report.__dict__, indent=2))
    return 0 if report.identical else 1


if __name__ == "__main__":
    sys.exit(main())
