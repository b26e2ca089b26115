"""Builds the options of the config group `parallel` from the ranks that torchrun started."""

from stabletrain.errors import ConfigError
from stabletrain.parallel.ddp import DDP
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.hsdp import HSDP
from stabletrain.parallel.ranks import Ranks, Timeouts, current_ranks
from stabletrain.parallel.single import SingleProcess
from stabletrain.program import torchrun_target


def auto(find_unused_parameters: bool, compare: bool, start_timeout: float, timeout: float) -> SingleProcess | DDP:
    """Returns DDP if there are several ranks, else SingleProcess."""
    ranks = current_ranks()
    if not ranks.distributed:
        return SingleProcess(ranks)
    return DDP(ranks, find_unused_parameters, compare, Timeouts(start_timeout, timeout))


def ddp(find_unused_parameters: bool, compare: bool, start_timeout: float, timeout: float) -> DDP:
    """Returns DDP; needs torchrun."""
    return DDP(launched_ranks("ddp"), find_unused_parameters, compare, Timeouts(start_timeout, timeout))


def fsdp(reshard_after_forward: bool, start_timeout: float, timeout: float) -> FSDP:
    """Returns FSDP2; needs torchrun."""
    return FSDP(launched_ranks("fsdp"), reshard_after_forward, Timeouts(start_timeout, timeout))


def hsdp(
    shard: int | None,
    replicate: int | None,
    reshard_after_forward: bool,
    compare: bool,
    start_timeout: float,
    timeout: float,
) -> HSDP:
    """Returns FSDP2 in several copies; needs torchrun. `config/rules.py` checks that the copies make up all ranks."""
    ranks = launched_ranks("hsdp")
    shards = ranks.sharing(shard, replicate)
    return HSDP(ranks, shards, reshard_after_forward, compare, Timeouts(start_timeout, timeout))


def launched_ranks(name: str) -> Ranks:
    """Returns the ranks that torchrun started.

    Raises:
        ConfigError: torchrun did not start this process.
    """
    ranks = current_ranks()
    if not ranks.launched:
        raise ConfigError(
            f"parallel={name} needs torchrun: torchrun --nproc_per_node=<processes> {torchrun_target()} "
            f"parallel={name} ...; parallel=auto trains in one process too"
        )
    return ranks
