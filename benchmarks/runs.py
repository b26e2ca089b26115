"""Runs from overrides: composed in this process, or started as a user's command. The tests use this file too."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"

TINY_GPT = [
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=16",
    "data.block_size=16",
    "batch_size=4",
    "device=cpu",
    "wandb=disabled",
    "eval_batches=2",
]
"""A GPT whose steps take some milliseconds."""

TINY_RESNET = ["model=resnet20", "data=digits", "batch_size=8", "device=cpu", "wandb=disabled", "eval_batches=2"]
"""A ResNet on digits whose steps take some tens of milliseconds."""


@contextlib.contextmanager
def composed(*overrides: str, config_name: str = "config") -> Iterator[DictConfig]:
    """Context that yields a command line's configuration, with Hydra's globals as inside a job."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(config_name, list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        yield cfg


def command(*arguments: str, cwd: Path, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess:
    """Runs `python train.py ...` in `cwd`, as a user does."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
