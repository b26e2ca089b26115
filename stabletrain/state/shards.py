"""Parts of sharded tensors: what one rank holds of a state, put by in memory and taken out again as sharded tensors.

A snapshot of a sharded model is each rank's own part, copied to its own host: nothing is sent, and no rank ever holds
the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabletrain.state.tree import Tree, map_tensors


class Place(NamedTuple):
    """Where the ranks of a sharded state write a checkpoint of it.

    Attributes:
        temporary: a hidden folder, which all of them see.
        rank: this process.
        count: of ranks.
    """

    temporary: Path
    rank: int
    count: int


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor, and where it belongs.

    Attributes:
        local: the part, on the host.
        mesh, placements, shape, stride: of the sharded tensor.
        device: where it lived.
    """

    local: Tensor
    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is one of which each rank has a part (a DTensor)."""
    return hasattr(tensor, "to_local")


def apart(tree: Tree) -> Tree:
    """The same tree with every sharded tensor replaced by a `Piece`, a copy on the host that nobody waits for."""

    def piece(tensor: Any) -> Any:
        if not is_sharded(tensor):
            return tensor
        local = tensor.detach().to_local()
        pinned = local.device.type == "cuda"
        host = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned).copy_(local, non_blocking=pinned)
        return Piece(host, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), local.device)

    return map_tensors(piece, tree)


def together(tree: Tree) -> Tree:
    """The same tree with every `Piece` turned into a sharded tensor again, in new memory on its device."""
    if isinstance(tree, Piece):
        from torch.distributed.tensor import DTensor

        local = tree.local.to(tree.device, copy=True)
        return DTensor.from_local(
            local, tree.mesh, tree.placements, run_check=False, shape=tree.shape, stride=tree.stride
        )
    if isinstance(tree, Mapping):
        return {key: together(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(together(child) for child in tree)
    return tree


def whole(tree: Tree, keep: bool) -> Tree:
    """The same tree with every sharded tensor gathered, one at a time, by all ranks together.

    Args:
        tree: the same on every rank.
        keep: whether this rank wants it; on others nothing is kept, and what is returned is of no use.
    """

    def gathered(tensor: Any) -> Tensor:
        if not is_sharded(tensor):
            return tensor
        full = tensor.detach().full_tensor()
        return full.to("cpu") if keep else torch.empty(0)

    return map_tensors(gathered, tree)
