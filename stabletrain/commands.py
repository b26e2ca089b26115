"""How this process was started, by python, torchrun or Slurm, so that a person can be told a command to go on with."""

import os
import shlex
import sys
from pathlib import Path

from stabletrain.arguments import key_of
from stabletrain.ranks import Ranks

LAUNCH = "STABLETRAIN_LAUNCH"
"""In a Slurm job's environment: `slurm/launch.sh` and its options, as its script has them."""


def program(ranks: Ranks) -> list[str]:
    """The words before what `train.py` is given: `python train.py`, `torchrun --nproc_per_node=2 train.py` ..."""
    if launch := os.environ.get(LAUNCH):
        return shlex.split(launch)
    if not ranks.launched:
        return ["python", sys.argv[0]]
    each, nodes = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.count)), os.environ.get("GROUP_WORLD_SIZE", "1")
    meeting = []
    if nodes != "1":  # typed on each of them
        meeting = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={os.environ['MASTER_ADDR']}:29400"]
    return ["torchrun", *meeting, f"--nproc_per_node={each}", sys.argv[0]]


def again(ranks: Ranks, folder: Path) -> str:
    """How to go on with a run that was interrupted: what was typed, with `resume=auto`.

    Args:
        ranks: this process among those of the run.
        folder: the run's.
    """
    words = program(ranks)
    if LAUNCH in os.environ:
        return f"by itself, where the job queues again; else {shlex.join([*words, f'resume={folder}'])}"
    typed = [word for word in arguments(sys.orig_argv, sys.argv[0]) if key_of(word) != "resume"]
    return shlex.join([*words, *typed, "resume=auto"])


def arguments(command: list[str], script: str) -> list[str]:
    """What follows the script in a command line."""
    return command[command.index(script) + 1 :] if script in command else command[1:]
