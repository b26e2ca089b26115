"""A state as a tree of tensors and plain values, and the sharded tensors in it.

A state tree is taken apart into named tensors and a JSON skeleton, and put together again exactly.

A tree is made of dicts with str keys, lists, tuples, tensors, str, bool, int, float and None. The skeleton is
the same tree with `{"$tensor": name}` in each tensor's place, so a checkpoint needs no pickle: tensors go to
safetensors, the skeleton to JSON. A key that itself begins with `$` gets a second one.

Parts of sharded tensors: what one rank holds of a state, put by in memory and taken out again as sharded tensors.

A snapshot of a sharded model is each rank's own part, copied to its own host: nothing is sent, and no rank ever holds
the whole.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tree = Any
"""Nested dict, list, tuple, Tensor, str, bool, int, float or None; a recursive type that no checker knows."""


def flatten(tree: Tree) -> tuple[dict[str, Tensor], Tree]:
    """Takes a tree apart.

    Args:
        tree: see the module. Tensors of any shape and dtype; they are returned as they are, not copied.

    Returns:
        the tensors by name, and the skeleton that `json.dumps(skeleton, allow_nan=False)` accepts. A name is
        the path of keys joined by `/`; should two paths read alike, the later one gets a `~`. Tuples become
        lists. A float keeps every bit of its value (NaN and infinities are written as words; a NaN's payload
        is not kept).

    Raises:
        TypeError: a key that is no str, or a value of another type; names its path.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Tree, path: tuple[str, ...]) -> Tree:
        match node:
            case Tensor():
                name = "/".join(path)
                while name in tensors:
                    name += "~"
                tensors[name] = node
                return {"$tensor": name}
            case None | bool() | str():
                return node
            case int():
                return int(node)
            case float():
                return float(node) if math.isfinite(node) else {"$float": repr(float(node))}
            case list() | tuple():
                return [walk(child, (*path, str(i))) for i, child in enumerate(node)]
            case Mapping():
                for key in node:
                    if not isinstance(key, str):
                        raise TypeError(f"state at '{'/'.join(path)}' has the key {key!r}: keys must be str")
                return {_escape(key): walk(child, (*path, key)) for key, child in node.items()}
        raise TypeError(
            f"state at '{'/'.join(path)}' is a {type(node).__name__}: only dict, list, tuple, Tensor, str, "
            "bool, int, float and None can be saved without pickling"
        )

    return tensors, walk(tree, ())


def unflatten(skeleton: Tree, tensors: Mapping[str, Any]) -> Tree:
    """Puts together what `flatten` took apart; tuples come back as lists.

    Raises:
        KeyError: the skeleton names a tensor that is not there.
    """

    def walk(node: Tree) -> Tree:
        if isinstance(node, list):
            return [walk(child) for child in node]
        if not isinstance(node, dict):
            return node
        if "$tensor" in node:
            return tensors[node["$tensor"]]
        if "$float" in node:
            return float(node["$float"])
        return {key.removeprefix("$"): walk(child) for key, child in node.items()}

    return walk(skeleton)


def to_host(tree: Tree, *, wait: bool = True) -> Tree:
    """The same tree with detached, contiguous CPU copies that share no memory with the live state, nor each
    other.

    CUDA tensors are copied into page-locked memory without waiting, then waited for once; or not at all, where
    `wait` is False: who reads them on the host must then synchronise first. A sharded tensor (DTensor) is gathered
    whole, which is a collective: all its ranks must call. Mappings become dicts, tuples stay tuples.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        gathered = getattr(tensor, "full_tensor", None)
        if gathered is not None:
            tensor = gathered()
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        streams.setdefault(tensor.device, torch.cuda.current_stream(tensor.device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    copied = map_tensors(copy, tree)
    if wait:
        for stream in streams.values():
            stream.synchronize()
    return copied


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """A new tree of the same form with `function` applied to each tensor; containers are never shared."""
    match tree:
        case Tensor():
            return function(tree)
        case Mapping():
            return {key: map_tensors(function, child) for key, child in tree.items()}
        case list():
            return [map_tensors(function, child) for child in tree]
        case tuple():
            return tuple(map_tensors(function, child) for child in tree)
    return tree


def _escape(key: str) -> str:
    return "$" + key if key.startswith("$") else key


class ShardTarget(NamedTuple):
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


def detach_shards(tree: Tree) -> Tree:
    """The same tree with every sharded tensor replaced by a `Piece`, a copy on the host that nobody waits for."""

    def piece(tensor: Any) -> Any:
        if not is_sharded(tensor):
            return tensor
        local = tensor.detach().to_local()
        pinned = local.device.type == "cuda"
        host = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned).copy_(local, non_blocking=pinned)
        return Piece(host, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), local.device)

    return map_tensors(piece, tree)


def attach_shards(tree: Tree) -> Tree:
    """The same tree with every `Piece` turned into a sharded tensor again, in new memory on its device."""
    if isinstance(tree, Piece):
        from torch.distributed.tensor import DTensor

        local = tree.local.to(tree.device, copy=True)
        return DTensor.from_local(
            local, tree.mesh, tree.placements, run_check=False, shape=tree.shape, stride=tree.stride
        )
    if isinstance(tree, Mapping):
        return {key: attach_shards(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(attach_shards(child) for child in tree)
    return tree


def gather_shards(tree: Tree, keep: bool) -> Tree:
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
