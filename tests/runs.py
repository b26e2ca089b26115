"""Runs for the tests: composed in this process from overrides, or executed as a user's command in a fork."""

import os
import subprocess
from pathlib import Path

from benchmarks.runs import CONF, ROOT, TINY_GPT, TINY_RESNET, composed
from tests import forkserver

__all__ = ["CONF", "OFF", "ROOT", "TINY_GPT", "TINY_RESNET", "command", "composed", "installed", "python"]

OFF = [
    "precision=fp32",
    "clipping=none",
    "warmup=none",
    "schedule=constant",
    "zloss=none",
    "qknorm=none",
    "softcap=none",
    "init=torch",
    "determinism=off",
    "guard=off",
    "checkpoint=off",
]
"""Switches off every group that changes training."""


def command(
    *arguments: str, cwd: Path, timeout: float = 240, torch: bool = True, **environment: str
) -> subprocess.CompletedProcess:
    """Runs `python train.py ...` in `cwd`, as a user does.

    Args:
        arguments: of `train.py`.
        cwd: the working folder.
        timeout: seconds after which it is killed.
        torch: whether torch may be imported already; see `tests.forkserver`.
        environment: variables in addition to those of this process.
    """
    return python(str(ROOT / "train.py"), *arguments, cwd=cwd, timeout=timeout, torch=torch, **environment)


def installed(*arguments: str, cwd: Path, timeout: float = 240, torch: bool = True) -> subprocess.CompletedProcess:
    """Runs `stabletrain train ...` in `cwd`; see `command`."""
    return python("-m", "stabletrain.cli.commands", "train", *arguments, cwd=cwd, timeout=timeout, torch=torch)


def python(
    *argv: str, cwd: Path, timeout: float = 240, torch: bool = True, **environment: str
) -> subprocess.CompletedProcess:
    """Runs `python argv...`: a script or `-m module`, with its arguments; see `command`."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return forkserver.run(argv, cwd, variables, timeout, "program" if torch else "command line")
