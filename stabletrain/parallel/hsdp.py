"""HSDP: some ranks share one copy of weights, gradients and moments, and there are several such copies.

    ranks 0 1 2 3 | 4 5 6 7      8 ranks, shards=4: two copies, each over 4 ranks in a row, such as those of one machine

Weights are gathered among the ranks of a copy. Gradients are reduced among them, and then averaged over the ranks that
have the same rows, one of each copy. So most bytes stay within a machine. All copies take the same steps from the same
gradients: what belongs to a whole tensor is summed over the ranks of one copy (`shards.py`), the first copy is the one
that is saved, and the copies are compared as the replicas of DDP are.

Source: "hybrid sharding" of Zhao et al., arXiv 2304.11277, section 3.2.2; `fully_shard` with a mesh of two dimensions.
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stabletrain.parallel.ddp import find_divergence
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.ranks import Ranks, Timeouts
from stabletrain.records import GradNorms, TrainState


class HSDP(FSDP):
    """Copies of sharded tensors.

    Attributes:
        compare: whether the copies are compared before a state is evaluated or saved.
    """

    name = "hsdp"

    def __init__(
        self,
        ranks: Ranks,
        shards: int,
        reshard_after_forward: bool = True,
        compare: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        super().__init__(ranks, reshard_after_forward, timeouts)
        self.shards, self.compare = shards, compare

    def mesh(self, device: str) -> DeviceMesh:
        """Returns the ranks as copies x shards."""
        shape = self.ranks.world_size // self.shards, self.shards
        return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    def norms_from_rows(self, norms: GradNorms, rows: Tensor) -> GradNorms:
        """Returns the norms of one copy, of each shard the largest over the copies; NaN if one of them is."""
        return super().norms_from_rows(norms, rows.view(-1, self.shards, rows.shape[1]).amax(dim=0))

    def find_divergence(self, state: TrainState) -> str:
        """Returns which ranks' shards differ from those of the other copies; empty with `compare=false`."""
        return find_divergence(state, self.shards) if self.compare else ""
