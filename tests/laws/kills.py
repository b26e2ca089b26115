"""Kills a real run with SIGKILL at random moments, resumes it each time, and compares its end with an unkilled run's.

    python -m tests.laws.kills --kills 30

The moments are uniform over the run's duration, and checkpoints are written every other step, so that a share of the
kills falls inside a checkpoint's writing; the report counts them.
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
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from stabletrain.tracking.metrics import read_jsonl
from tests.runs import ROOT, TINY_GPT

STEPS = 120
RUN = [
    *TINY_GPT,
    "model.n_embd=64",
    "model.dropout=0.1",
    f"steps={STEPS}",
    "checkpoint.every=2",
    "eval_every=40",
    "log_every=1",
]
CLOCK = {"time", "tokens_per_s"}


@dataclass
class Report:
    """What a campaign found.

    Attributes:
        kills: processes killed.
        inside_write: of them, with a checkpoint half-written.
        resumed_from: steps that resumes began at.
        identical: whether the end is bit-identical to the unkilled run's.
        difference: what differs, if anything.
    """

    kills: int = 0
    inside_write: int = 0
    resumed_from: tuple[int, ...] = ()
    identical: bool = False
    difference: str = ""


def everything(checkpoint: Path) -> dict:
    """All that a checkpoint holds but the clock, comparable: tensors as bytes, the rest as JSON."""
    state = json.loads((checkpoint / "state.json").read_text())
    del state["training"]["parts"]["history"]["seconds"]
    tensors = {}
    for file in ("model.safetensors", "training.safetensors"):
        with safe_open(checkpoint / file, framework="pt") as opened:
            tensors |= {f"{file}:{name}": opened.get_tensor(name).numpy().tobytes() for name in opened.keys()}  # noqa: SIM118
    return {"step": checkpoint.name, "state": state, "tensors": tensors, "names": sorted(tensors)}


def metrics(folder: Path) -> list[dict]:
    """The lines of `metrics.jsonl` but the clock."""
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in read_jsonl(folder / "metrics.jsonl")]


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    """`python train.py` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *RUN, f"hydra.run.dir={folder}", *overrides],
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> None:
    """Waits for a run that nobody kills."""
    _, errors = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(errors)


def first_line(folder: Path, process: subprocess.Popen, lines: int) -> None:
    """Waits until the run has logged more than `lines`, or has ended."""
    file = folder / "metrics.jsonl"
    while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") <= lines):
        time.sleep(0.01)


def campaign(place: Path, kills: int, seed: int) -> Report:
    """One run, killed `kills` times at random moments, against one that is left alone."""
    draw, report = random.Random(seed), Report()
    whole, cut = place / "whole", place / "cut"
    place.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    process = start(whole)
    first_line(whole, process, 0)
    training = -time.monotonic()
    finish(process)
    training += time.monotonic()
    resumes = []
    while report.kills < kills:
        if (cut / "run.json").exists() and json.loads((cut / "run.json").read_text())["status"] == "finished":
            if error := compare(whole, cut):
                report.difference = error
                return report
            cut = place / f"cut{report.kills}"  # it outran the killer: begin another
        process = start(cut, "resume=auto")
        lines = (cut / "metrics.jsonl").read_bytes().count(b"\n") if (cut / "metrics.jsonl").exists() else 0
        del lines
        before = len(resumed(cut))
        while process.poll() is None and len(resumed(cut)) == before and not (cut / "metrics.jsonl").exists():
            time.sleep(0.005)
        time.sleep(draw.uniform(0, training * 0.6))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            report.kills += 1
            report.inside_write += any((cut / "checkpoints").glob(".step-*")) if (cut / "checkpoints").is_dir() else 0
        process.communicate()
        resumes += resumed(cut)[before:]
    finish(start(cut, "resume=auto"))
    resumes += resumed(cut)[-1:]
    report.resumed_from = tuple(resumes)
    report.difference = compare(whole, cut)
    report.identical = not report.difference
    print(f"{report.kills} kills in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return report


def resumed(folder: Path) -> list[int]:
    """Steps at which the run was resumed so far."""
    file = folder / "events.jsonl"
    return [e["step"] for e in read_jsonl(file) if e["event"] == "resume"] if file.exists() else []


def compare(whole: Path, cut: Path) -> str:
    """The first difference between the ends of two runs, or nothing."""
    one, other = (everything(max((folder / "checkpoints").glob("step-*"))) for folder in (whole, cut))
    for key in ("step", "state", "names"):
        if one[key] != other[key]:
            return f"{key}: {one[key]} against {other[key]}"
    for name in one["names"]:
        if one["tensors"][name] != other["tensors"][name]:
            return f"{name} differs"
    if metrics(whole) != metrics(cut):
        return "metrics.jsonl differs"
    return ""


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
