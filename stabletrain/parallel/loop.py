"""The ranks of a loop of the user's own, which has set up DDP or FSDP2 itself, and the wrappers around its model.

With DDP the gradients are averaged already. With FSDP2 each rank has its shards, whose squares add up, with HSDP those
of one copy; other parameters of the same model may be whole.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stabletrain.errors import ConfigError
from stabletrain.parallel.distributed import Distributed
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import GradNorms, RankPart


class LoopRanks(Distributed):
    """Several ranks, each with a loss of its own: the mean over its part of the batch."""

    name = "loop"

    def terms_from_rows(self, rows: Tensor) -> Tensor:
        """Returns the mean of the losses over the ranks."""
        return rows.mean(dim=0)

    def gradient_row(self, norms: GradNorms) -> Tensor:
        """Returns this rank's share of the squared norm of all shards, and the norm of the whole gradients."""
        shares = torch.tensor([*norms.sharded] or [0.0], device=norms.each.device)
        squares, sharded = norms.each.square(), shares > 0
        whole = norms.total if not any(norms.sharded) else torch.where(sharded, 0.0, squares).sum().sqrt()
        return torch.stack([torch.where(sharded, shares * squares, 0.0).sum(), whole])

    def norms_from_rows(self, norms: GradNorms, rows: Tensor) -> GradNorms:
        """Returns the norm of the whole gradient: the sum over all shards, and the largest norm of what is whole."""
        shard_squares, whole = rows.unbind(dim=1)
        total = torch.amax(whole)
        if any(norms.sharded):
            total = (shard_squares.sum() + total.square()).sqrt()
        return GradNorms(total, norms.each)

    def with_grad_norm(self, part: RankPart, grad_norm: float, factor: float) -> RankPart:
        """Returns the part as it is: a rank's own gradients are unknown, since the loop has averaged them."""
        return part

    def any_rank(self, here: bool) -> bool:
        """Returns whether `here` is true on any rank; all of them must call it.

        Communicates as the loop's gradients do: this is asked after every update that is checked.
        """
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        found = torch.tensor(float(here), device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def wait_for(self, event: Any) -> None:
        """Waits until the device has reached a CUDA event. If a rank is lost, the loop's own timeout ends the wait."""
        event.synchronize()


def ranks_of_loop() -> SingleProcess:
    """Returns the ranks of the process group that the loop has joined; a single process if it has joined none."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return SingleProcess()
    return LoopRanks(Ranks(dist.get_rank(), dist.get_world_size(), launched=True))


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


def rebuild_buckets(model: nn.Module) -> None:
    """Makes DDP group the gradients anew now, which it does once, in the forward pass after the first backward pass.

    All ranks take part in this: a rank that ran its forward pass alone, to explain the first step, would wait for ever.
    """
    for wrapper in wrappers(model):
        wrapper.reducer._rebuild_buckets()


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Returns the DDP wrappers around and inside a model."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
