"""Runs for the tests: in this process from overrides, or as a user's command in a fork or a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.runs import CONF, ROOT, TINY_GPT, TINY_RESNET, composed
from tests import forkserver

__all__ = ["CONF", "OFF", "ROOT", "TINY_GPT", "TINY_RESNET", "command", "composed", "python"]

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
"""Every group that acts, switched off."""


def command(
    *arguments: str, cwd: Path, timeout: float = 240, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess:
    """`python train.py ...` as a user types it, in `cwd`.

    Args:
        arguments: of `train.py`.
        cwd: the working folder.
        timeout: seconds after which it is killed.
        fresh: starts a new interpreter, for tests about what is imported; the others share a fork server's imports.
        environment: variables beside those of this process.
    """
    return python(str(ROOT / "train.py"), *arguments, cwd=cwd, timeout=timeout, fresh=fresh, **environment)


def python(
    *argv: str, cwd: Path, timeout: float = 240, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess:
    """`python argv...`: a script or `-m module`, with its arguments; see `command`."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    if not fresh:
        return forkserver.run(argv, cwd, variables, timeout)
    words = [sys.executable, *argv]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=variables)
