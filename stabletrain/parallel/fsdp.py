"""FSDP2: weights, gradients and moments are sharded across ranks; each block's weights are gathered when used.

Source: Zhao et al., arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from stabletrain.checkpoint.tree import Tree
from stabletrain.parallel.distributed import Distributed
from stabletrain.parallel.gathered import gather_in
from stabletrain.parallel.ranks import Ranks, Timeouts
from stabletrain.parallel.single import NO_CASTS
from stabletrain.parallel.unreduced import unreduced
from stabletrain.parallel.whole import GatheredState, WholeState
from stabletrain.records import GradNorms, RankPart


class FSDP(Distributed):
    """Sharded tensors.

    Attributes:
        reshard_after_forward: free a block's gathered weights after its forward pass, and gather them again for its
            backward pass: less memory, 1.5 times the traffic.
    """

    name = "fsdp"
    has_whole_moments = False

    def __init__(self, ranks: Ranks, reshard_after_forward: bool = True, timeouts: Timeouts | None = None) -> None:
        super().__init__(ranks, timeouts)
        self.shards = ranks.world_size
        self.reshard_after_forward = reshard_after_forward

    def optimizer_overrides(self, choice: str) -> Mapping[str, Any]:
        """Disables the fused kernel of SGD, which PyTorch does not support for sharded tensors."""
        return {"fused": False} if choice == "sgd" else {}

    def shard(self, model: nn.Module, casts: Mapping[str, torch.dtype] = NO_CASTS) -> None:
        """Shards the weights of every block (members of module lists), then the rest."""
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # channels_last kernels cannot be sharded by rows
        mesh = self.mesh(next(model.parameters()).device.type)
        for block in blocks(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        # The backward pass begins with the rest, so it stays whole until then.
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        model.register_forward_hook(give_up_whole_weights)
        for name, parameter in model.named_parameters():
            if name in casts:
                gather_in(parameter, casts[name])

    def mesh(self, device: str) -> DeviceMesh:
        """Returns the ranks that share the weights: all of them. Every rank must call it."""
        return init_device_mesh(device, (self.ranks.world_size,))

    def with_whole(self, forward: Callable[..., Any], model: nn.Module, part: nn.Module | None) -> Callable[..., Any]:
        """Returns a forward pass after which the weights of the unit that holds `part` are gathered.

        This is the all-gather that the backward pass would begin with, so nothing more is sent.
        """
        units = [each for each in model.modules() if isinstance(each, FSDPModule)]
        holders = [unit for unit in units if any(module is part for module in unit.modules())]
        if not holders:  # a whole copy of the model, as for a replay
            return forward
        innermost = holders[-1]

        def gathering(*inputs: Any, **options: Any) -> Any:
            outputs = forward(*inputs, **options)
            innermost.unshard()
            return outputs

        return gathering

    @contextmanager
    def gradient_sync(self, model: nn.Module, last: bool) -> Generator[None]:
        """A context that reduces gradients after the last micro-batch only, and keeps them unsharded before."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        yield

    def keep_gradients(self) -> bool:
        """Returns False: a rank sees only sums over all ranks, so no rank could be named."""
        return False

    def own_backward(self, model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor | None] | None:
        """See `SingleProcess`. Too little memory ends the run: a rank that gave up would leave the others waiting."""
        return unreduced(model, run)

    def whole_state(
        self, model: nn.Module, older: Callable[[], Tree | None], model_factory: Callable[[], nn.Module]
    ) -> WholeState:
        """Returns states whose weights can be gathered on every rank; all ranks must do so together."""
        sharing = replace(self.ranks, rank=self.ranks.rank % self.shards, world_size=self.shards)
        return GatheredState(model, older, model_factory, sharing)

    def with_grad_norm(self, part: RankPart, grad_norm: float, factor: float) -> RankPart:
        """Adds the norm of this rank's shards. They belong to the sum over all ranks, so no factor applies."""
        return part._replace(shard_norm=grad_norm)

    def gradient_row(self, norms: GradNorms) -> Tensor:
        """Returns the squared norm of this rank's shard of every tensor."""
        return norms.each.square()

    def norms_from_rows(self, norms: GradNorms, rows: Tensor) -> GradNorms:
        """Returns the norms from the sums of the squares over the ranks."""
        each = rows.sum(dim=0).sqrt()
        return GradNorms(total=torch.linalg.vector_norm(each), each=each)


def give_up_whole_weights(model: nn.Module, inputs: Any, output: Any) -> None:
    """Shards again what a forward pass without a backward pass has left whole, such as that of an evaluation."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the members of the model's module lists, inner before outer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    found = [block for each in reversed(lists) for block in each if any(True for _ in block.parameters())]
    return list(dict.fromkeys(found))
