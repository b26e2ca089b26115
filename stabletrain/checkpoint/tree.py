"""Converts a state tree to named tensors and a JSON skeleton and back, and copies it to the host.

A tree consists of dicts with str keys, lists, tuples, tensors, str, bool, int, float and None; a `Piece` may stand for
a tensor. The skeleton is the same tree with `{"$tensor": name}` in place of each tensor. Tensors go to safetensors and
the skeleton to JSON, so a checkpoint needs no pickle. A key that begins with `$` gets a second `$`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabletrain.checkpoint.host_copies import host_copies

Tree = Any
"""A state tree; type checkers do not support the recursive type."""

LEAVES = frozenset({str, bool, int, float, type(None)})
"""Types of which every instance is a leaf, and no tensor."""


def flatten(tree: Tree) -> tuple[dict[str, Any], Tree]:
    """Converts a tree to its tensors and a skeleton.

    Args:
        tree: see the module. The tensors are returned as they are, not copied.

    Returns:
        the tensors by name, and the skeleton, which `json.dumps(skeleton, allow_nan=False)` accepts. A name is the path
        of keys joined by `/`; if two paths give the same name, the later one gets a `~`. Tuples become lists. NaN and
        infinities become strings (the payload of a NaN is lost).

    Raises:
        TypeError: a key is not a str, or a value has another type; names its path.
    """
    tensors: dict[str, Any] = {}

    def walk(node: Tree, path: tuple[str, ...]) -> Tree:
        match node:
            case Tensor() | Piece():
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
    """Reverses `flatten`, except that tuples come back as lists.

    Raises:
        KeyError: the skeleton names a tensor that is missing.
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


def to_host(tree: Tree) -> Tree:
    """Returns the same tree with detached, contiguous CPU copies that share no memory with the state or each other.

    The copies lie in a few blocks (`host_copies.py`). Gathers sharded tensors (DTensor), one at a time, which is a
    collective: all ranks must call it. Mappings become dicts, tuples stay tuples.
    """
    live: list[Tensor] = []
    map_tensors(lambda tensor: live.append(tensor.detach()), tree)
    copies = host_copies(live)
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for tensor, copy in zip(live, copies, strict=True):
        gathered = getattr(tensor, "full_tensor", None)
        copy.copy_(tensor if gathered is None else gathered(), non_blocking=tensor.device.type == "cuda")
        if tensor.device.type == "cuda":
            streams.setdefault(tensor.device, torch.cuda.current_stream(tensor.device))
    for stream in streams.values():
        stream.synchronize()
    each = iter(copies)
    return map_tensors(lambda _: next(each), tree)


def map_tensors(function: Callable[[Any], Any], tree: Tree, kind: type = Tensor) -> Tree:
    """Returns a new tree of the same structure with `function` applied to each tensor. Containers are never shared.

    Args:
        kind: `Piece` applies it to each piece instead.
    """
    if type(tree) in LEAVES:  # most of a state; the abstract classes below take ten times longer
        return tree
    match tree:
        case kind():
            return function(tree)
        case Mapping():
            return {key: map_tensors(function, child, kind) for key, child in tree.items()}
        case list():
            return [map_tensors(function, child, kind) for child in tree]
        case tuple():
            return tuple(map_tensors(function, child, kind) for child in tree)
    return tree


def _escape(key: str) -> str:
    return "$" + key if key.startswith("$") else key


class ShardWriters(NamedTuple):
    """The ranks that write a sharded state together.

    Attributes:
        rank: this process.
        count: number of ranks.
        patience: at most so many seconds may rank 0 wait for the others' parts: less than they wait for rank 0.
        ask_main: runs a function on rank 0, and returns its result on every rank; all ranks must call it.
    """

    rank: int
    count: int
    patience: float
    ask_main: Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Piece:
    """This rank's shard of a tensor, on the host. A state is restored from it without another copy on the device.

    Attributes:
        local: the shard.
        mesh, placements, shape, stride: of the sharded tensor.
    """

    local: Tensor
    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any, local: Tensor) -> "Piece":
        """Returns `local` as this rank's shard of a tensor that is sharded like `tensor`, a DTensor."""
        return cls(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def to_local(self) -> Tensor:
        """Returns the shard, as DTensor does."""
        return self.local

    def on(self, device: torch.device | str) -> Any:
        """Returns a DTensor in new memory on `device`: that of the mesh, or `meta` for its shapes alone."""
        from torch.distributed.tensor import DTensor

        local = self.local.to(device, copy=True)
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def is_sharded(tensor: Any) -> bool:
    """Returns whether a tensor is sharded across ranks: a DTensor, or a `Piece`."""
    return hasattr(tensor, "to_local")


def is_of_first_copy(tensor: Any) -> bool:
    """Returns whether this rank's shard of a sharded tensor is the first of several copies, or the only one."""
    mesh = tensor.mesh if isinstance(tensor, Piece) else tensor.device_mesh
    return all(mesh.get_local_rank(i) == 0 for i, each in enumerate(tensor.placements) if each.is_replicate())


def local_part(tensor: Any) -> Tensor:
    """Returns this rank's shard of a sharded tensor, or any other tensor, without its autograd history."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def unsharded(tree: Tree) -> Tree:
    """Returns the same tree with each `Piece` as a tensor: in a run of one rank, its shard is the whole."""
    return map_tensors(lambda piece: piece.local, tree, Piece)
