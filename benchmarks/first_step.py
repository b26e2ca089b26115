"""Times whole commands from outside: until they exit, or until a run has finished a given step."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRAIN = (sys.executable, str(ROOT / "train.py"))
LIMIT = 240.0
"""Seconds after which a command is aborted."""


@dataclass(frozen=True)
class Taken:
    """The seconds that a command took.

    Attributes:
        wall: wall-clock time.
        cpu: CPU time, user and system, of all threads.
    """

    wall: float
    cpu: float


def to_the_end(command: Sequence[str], cwd: Path, code: int) -> Taken:
    """Runs a command that must exit with `code`."""
    start = time.perf_counter()
    process = started(command, cwd)
    _, status, used = os.wait4(process.pid, 0)
    taken = Taken(time.perf_counter() - start, used.ru_utime + used.ru_stime)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == code, f"{' '.join(command)} ended with {process.returncode}, not {code}"
    return taken


def to_a_step(command: Sequence[str], cwd: Path, metrics: Path, step: int = 1) -> Taken:
    """Runs a training command until `metrics` holds the line of `step`, then kills it.

    A run writes its first line as soon as the step is done, and every later line once the next step has been computed.
    """
    start = time.perf_counter()
    process = started(command, cwd)
    try:
        while not reached(metrics, step):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} before step {step}")
            if time.perf_counter() - start > LIMIT:
                raise TimeoutError(f"{' '.join(command)}: no step {step} after {LIMIT:.0f} s")
            time.sleep(0.005)
        wall, fields = (
            time.perf_counter() - start,
            Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split(),
        )
        return Taken(wall, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    finally:
        process.kill()
        process.wait()


def reached(metrics: Path, step: int) -> bool:
    """Whether a run has logged this step."""
    try:
        lines = metrics.read_text().splitlines()
    except FileNotFoundError:
        return False
    return any(f'"step": {step},' in line or f'"step":{step},' in line for line in lines)


def started(command: Sequence[str], cwd: Path) -> subprocess.Popen:
    """Starts the command without output, with the project and the benchmarks' data classes on its path."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
