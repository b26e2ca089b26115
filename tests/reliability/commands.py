"""Runs `train.py` as a user does."""

import os
import subprocess
from pathlib import Path

from tests import forkserver
from tests.runs import ROOT


def command(*arguments: str, cwd: Path, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess:
    """Runs `python train.py ...` in `cwd`, as a user does."""
    return subprocess.run(
        [forkserver.python(), str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
