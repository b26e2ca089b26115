"""The options of the group `parallel`: what each makes of the ranks that torchrun has started."""

from stabletrain.errors import ConfigError
from stabletrain.parallel.ddp import DDP
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.ranks import Ranks, current_ranks
from stabletrain.parallel.single import SingleProcess


def auto(find_unused_parameters: bool, compare: bool) -> SingleProcess | DDP:
    """DDP where there are several ranks; nothing where there is one process."""
    ranks = current_ranks()
    return SingleProcess(ranks) if not ranks.distributed else DDP(ranks, find_unused_parameters, compare)


def ddp(find_unused_parameters: bool, compare: bool) -> DDP:
    """DDP."""
    return DDP(started("ddp"), find_unused_parameters, compare)


def fsdp(reshard_after_forward: bool) -> FSDP:
    """FSDP2."""
    return FSDP(started("fsdp"), reshard_after_forward)


def started(name: str) -> Ranks:
    """The ranks, if torchrun has started them.

    Raises:
        ConfigError: it has not.
    """
    ranks = current_ranks()
    if not ranks.launched:
        raise ConfigError(
            f"parallel={name} needs torchrun: torchrun --nproc_per_node=<processes> train.py parallel={name} ...; "
            "parallel=auto trains in one process too"
        )
    return ranks
