"""torchrun, as a user starts it: with the workers of the tests, or with `train.py`."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.runs import ROOT

PATIENCE = 300
"""Seconds that a launch may take before it counts as hanging."""


def torchrun(count: int, *arguments: str) -> list[str]:
    """The command that starts `count` ranks here."""
    options = [f"--nproc_per_node={count}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *arguments]


def start(count: int, *arguments: str, cwd: Path) -> subprocess.Popen:
    """torchrun as a process group of its own, so that nothing of it is left behind."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        torchrun(count, *arguments),
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = PATIENCE) -> subprocess.CompletedProcess:
    """Waits for its end, which is in time or an error.

    Raises:
        AssertionError: it hangs; with what it had said.
    """
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"hangs:\n{out[-3000:]}\n{err[-3000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def trained(count: int, *overrides: str, cwd: Path) -> subprocess.CompletedProcess:
    """`torchrun --nproc_per_node=count train.py ...`, to its end."""
    return finish(start(count, str(ROOT / "train.py"), *overrides, cwd=cwd))


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """The process of each rank that torchrun has started so far."""
    found = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        try:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {int(each[5:]): int(child) for each in environment if each.startswith(b"RANK=")}
    return found


def until(reached: Callable[[], bool], process: subprocess.Popen) -> None:
    """Waits until something has happened while a launch goes on."""
    end = time.monotonic() + PATIENCE
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.02)


def performed(place: Path, count: int, cases: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each rank saw of each case; launched once, whichever of several test processes asks first."""
    place.mkdir(parents=True, exist_ok=True)
    with alone(place / "lock"):
        if not (place / "done").exists():
            (place / "cases.json").write_text(json.dumps(cases))
            process = finish(start(count, "-m", "tests.parallel.worker", str(place), cwd=ROOT))
            assert process.returncode == 0, f"{process.stdout[-2000:]}\n{process.stderr[-6000:]}"
            (place / "done").touch()
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(count)]


@contextmanager
def alone(path: Path) -> Generator[None]:
    """Lets one process in at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
