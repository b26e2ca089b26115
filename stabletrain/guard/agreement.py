"""The numbers of a step, equal on all ranks of DDP or FSDP2, so that all reach the same verdict.

Each rank contributes one small row: its loss, the norm of its buffers, and the norms of its gradients. With DDP the
gradients are averaged already; with FSDP2 each rank has its shards, whose squares add up.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks, all_gather_tensor
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import GradNorms, LossTerms, Number, StepChecks


class RankNumbers(NamedTuple):
    """What one rank measured of its own part of a step.

    Attributes:
        loss: 0-d.
        norms: of this rank's gradients.
        buffers: norm of this rank's buffers.
        changed: 1 if this rank's state has changed since the last update, else 0.
        sharded: for each of `norms.each`, whether it is that of a shard.
        unproven: whether this rank would check the update after it.
    """

    loss: Tensor
    norms: GradNorms
    buffers: Number
    changed: Number
    sharded: Sequence[bool]
    unproven: bool


class OneRank(SingleProcess):
    """One process: its own numbers are those of the step.

    Attributes:
        ranks: this process.
    """

    ranks = Ranks()

    def agree(self, own: RankNumbers) -> tuple[LossTerms, GradNorms, StepChecks]:
        """Returns the numbers of the whole step, equal on every rank."""
        checks = StepChecks(0.0, 0.0, own.buffers, own.changed, unproven=float(own.unproven))
        return LossTerms(own.loss.float()), own.norms, checks

    def any_rank(self, here: bool) -> bool:
        """Returns whether `here` is true on any rank."""
        return here


class AllRanks(OneRank):
    """Several ranks."""

    def __init__(self) -> None:
        self.ranks = Ranks(dist.get_rank(), dist.get_world_size(), launched=True)

    def agree(self, own: RankNumbers) -> tuple[LossTerms, GradNorms, StepChecks]:
        """Returns the mean of the losses, the largest norm of the buffers, and the norm of the whole gradient."""
        norms, sharded = own.norms, own.sharded
        shards = torch.tensor([*sharded] or [False], device=norms.each.device)
        squares = norms.each.square()
        shard_squares = torch.where(shards, squares, 0.0).sum()
        whole = norms.total if not any(sharded) else torch.where(shards, 0.0, squares).sum().sqrt()
        buffers, changed, unproven = (
            each if isinstance(each, Tensor) else torch.full_like(norms.total, each)
            for each in (own.buffers, own.changed, float(own.unproven))
        )
        row = torch.stack([own.loss.float(), buffers, shard_squares, whole, changed, unproven])
        rows = row.new_empty(self.ranks.world_size * row.numel())
        all_gather_tensor(rows, row)
        losses, buffers, shard_squares, whole, changed, unproven = rows.view(self.ranks.world_size, -1).unbind(1)
        # Every rank computes the same from the same rows.
        total = torch.amax(whole)
        if any(sharded):
            total = (shard_squares.sum() + total.square()).sqrt()
        bad = ~torch.isfinite(losses) | (changed > 0)
        first = torch.where(bad.any(), bad.float().argmax(), -1)
        stop = torch.zeros_like(first, dtype=torch.bool)
        checks = StepChecks(0.0, 0.0, buffers.amax(), changed.amax(), stop=stop, rank=first, unproven=unproven.amax())
        return LossTerms(losses.mean()), GradNorms(total, norms.each), checks

    def any_rank(self, here: bool) -> bool:
        """Returns whether `here` is true on any rank; all of them must call it."""
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        found = torch.tensor(float(here), device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)


def agreement_of_ranks() -> OneRank:
    """Returns the agreement of this process: with the other ranks, if it is one of several."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return AllRanks() if several else OneRank()


def innermost(model: nn.Module) -> nn.Module:
    """Returns the user's own module inside the wrappers of `torch.compile` and DDP.

    Raises:
        ConfigError: it is sharded by the older FSDP, whose flat parameters hide the model's own.
    """
    while True:
        inner = getattr(model, "_orig_mod", None) or (
            model.module if isinstance(model, DistributedDataParallel) else None
        )
        if not isinstance(inner, nn.Module):
            break
        model = inner
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError("FullyShardedDataParallel hides the model's own parameters: use fully_shard (FSDP2)")
    return model


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Returns the DDP wrappers around and inside a model."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
