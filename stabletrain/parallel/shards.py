"""The parts of sharded tensors (DTensors), and sums over the ranks that hold them.

FSDP2 shards the first dimension: a rank holds whole rows of a tensor, or none if the tensor has fewer rows than there
are ranks. What is elementwise runs on a rank's part. A number that belongs to a whole tensor is a sum over its parts,
and this file is where they are summed: over the dimensions of the mesh that shard the tensor, not over those that
replicate it.

All ranks of the mesh must call these sums in the same order, also those that hold no row.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Returns whether a tensor is sharded across ranks."""
    return hasattr(tensor, "to_local")


def shards_of(tensor: Any) -> int:
    """Returns over how many ranks a DTensor is split."""
    return prod(tensor.device_mesh.size(i) for i, each in enumerate(tensor.placements) if each.is_shard())


def local_parts(tensors: Iterable[Any]) -> list[Tensor]:
    """Returns this rank's part of each sharded tensor, a view; and every other tensor as it is."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


def sum_over_shards(
    numbers: Float[Tensor, "tensors *others"], tensors: Sequence[Any]
) -> Float[Tensor, "tensors *others"]:
    """Returns the sums over the parts of each tensor, in one all-reduce for all tensors that are sharded alike.

    Args:
        numbers: one row for each tensor, computed from this rank's part of it.
        tensors: the tensors. The row of one that is not sharded stays as it is.
    """
    alike: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor):
            alike.setdefault((tensor.device_mesh, tensor.placements), []).append(index)
    if not alike:
        return numbers
    rows = list(numbers.unbind())
    for (mesh, placements), indices in alike.items():
        sums = torch.stack([rows[index] for index in indices])
        for dimension, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(sums, group=mesh.get_group(dimension))
        for index, row in zip(indices, sums.unbind(), strict=True):
            rows[index] = row
    return torch.stack(rows)


def norms_over_shards(norms: Float[Tensor, " tensors"], tensors: Sequence[Any]) -> Float[Tensor, " tensors"]:
    """Returns the L2 norm of each whole tensor, from those of this rank's parts.

    The squares are added in float64, in which those of fp32 neither overflow nor round.
    """
    if not any(map(is_sharded, tensors)):
        return norms
    return sum_over_shards(norms.double().square(), tensors).sqrt().to(norms.dtype)
