"""A small run with a trouble: an update 3000 times too long at step 90, after which the guard rolls back."""

from pathlib import Path

import stabletrain
from tests.runs import TINY_GPT

STEPS = 160

TROUBLED = [
    *TINY_GPT,
    f"steps={STEPS}",
    "precision=fp32",
    "faults=learning_rate",
    "faults.at=[90]",
    "faults.factor=3000",
]
TROUBLED += ["guard.snapshot_every=20", "guard.healthy_after=5", "guard.patience=4", "guard.skip_batches=2"]
TROUBLED += ["checkpoint.every=20", "checkpoint.keep=99", "eval_every=40", "log_every=10", "report=false"]


def trained(folder: Path, *overrides: str) -> Path:
    """Trains the run with further overrides in a folder, and returns the folder."""
    return stabletrain.train([*TROUBLED, *overrides, f"hydra.run.dir={folder}"]).folder
