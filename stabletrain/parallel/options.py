"""Builds the options of the config group `parallel` from the ranks that torchrun started."""

from stabletrain.errors import ConfigError
from stabletrain.parallel.ddp import DDP
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.ranks import Ranks, current_ranks
from stabletrain.parallel.single import SingleProcess


def auto(find_unused_parameters: bool, compare: bool) -> SingleProcess | DDP:
    """Returns DDP if there are several ranks, else SingleProcess."""
    ranks = current_ranks()
    return SingleProcess(ranks) if not ranks.distributed else DDP(ranks, find_unused_parameters, compare)


def ddp(find_unused_parameters: bool, compare: bool) -> DDP:
    """Returns DDP; needs torchrun."""
    return DDP(started("ddp"), find_unused_parameters, compare)


def fsdp(reshard_after_forward: bool) -> FSDP:
    """Returns FSDP2; needs torchrun."""
    return FSDP(started("fsdp"), reshard_after_forward)


def started(name: str) -> Ranks:
    """Returns the ranks that torchrun started.

    Raises:
        ConfigError: torchrun did not start this process.
    """
    ranks = current_ranks()
    if not ranks.launched:
        raise ConfigError(
            f"parallel={name} needs torchrun: torchrun --nproc_per_node=<processes> train.py parallel={name} ...; "
            "parallel=auto trains in one process too"
        )
    return ranks
