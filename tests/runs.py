"""Runs for the tests: composed in this process from overrides, or executed as a user's command in a fork.

The benchmarks compose their runs with this file, too.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from tests import forkserver

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

OFF = [
    "precision=fp32",
    "clipping=none",
    "warmup=none",
    "schedule=constant",
    "zloss=none",
    "qknorm=none",
    "softcap=none",
    "softmax=plain",
    "attention_gate=none",
    "init=torch",
    "determinism=off",
    "guard=off",
    "checkpoint=off",
]
"""Switches off every group that changes training."""


@contextlib.contextmanager
def composed(*overrides: str, config_name: str = "config") -> Iterator[DictConfig]:
    """Context that yields a command line's configuration, with Hydra's globals as inside a job."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(config_name, list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        yield cfg


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
