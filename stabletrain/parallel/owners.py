"""Divides work on whole matrices among the ranks: one rank, the owner of a matrix, does it for all.

| | each rank has | what is sent |
|---|---|---|
| `Owners` | every input, and does all work itself | nothing |
| `Replicas` (ddp) | every input | one all-gather: the results of all owners |
| `Shards` (fsdp) | some rows of every input | two all-to-alls: rows of inputs to owners, rows of results back |

The work goes to owners by its cost: the most expensive matrix first, to the rank that has the least to do so far. Every
rank finds the same owners from the same shapes, so they are not sent. Results are sent bit for bit.

Keller Jordan's Muon (github.com/KellerJordan/Muon) divides the matrices among the ranks of DDP and gathers the results.
Liu et al., arXiv 2502.16982, section 2.3, gather the rows of a sharded matrix on every rank that has some. Dion
(github.com/microsoft/dion) and torchtitan (pull request 4034) send them to one owner, by all-to-all, as here.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import BFloat16
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks, all_gather_tensor


@dataclass(frozen=True)
class MatrixWork:
    """Work on one matrix.

    Attributes:
        shape: rows and columns of the whole matrix.
        device: of input and result.
        cost: any measure of its duration; all ranks must know it.
        rows: returns the input, or of a sharded matrix this rank's rows of it.
        work: returns the result for a whole input.
    """

    shape: tuple[int, int]
    device: torch.device
    cost: float
    rows: Callable[[], BFloat16[Tensor, "rows columns"]]
    work: Callable[[BFloat16[Tensor, "rows columns"]], BFloat16[Tensor, "rows columns"]]


class Owners:
    """This rank does all work itself. Base class of the others."""

    def results(self, tasks: Sequence[MatrixWork]) -> Iterator[BFloat16[Tensor, "rows columns"]]:
        """Yields the result of each matrix, or of a sharded one this rank's rows of it.

        All ranks must ask for the results of the same matrices in the same order.
        """
        for task in tasks:
            yield task.work(task.rows())  # when it is asked for, so that only one is in memory

    def alone(self, costs: Sequence[float]) -> list[bool]:
        """Returns which of the matrices this rank works on without needing another one: all."""
        return [True] * len(costs)


@dataclass(frozen=True)
class Replicas(Owners):
    """Every rank has all inputs, equal bit for bit.

    Attributes:
        ranks: this process among the others.
    """

    ranks: Ranks

    def results(self, tasks: Sequence[MatrixWork]) -> Iterator[BFloat16[Tensor, "rows columns"]]:
        """See `Owners`."""
        if not tasks:
            return
        parts = divided(tasks, self.ranks.world_size)
        mine = [tasks[number].work(tasks[number].rows()).flatten() for number in parts[self.ranks.rank]]
        # An all-gather needs equal sizes. Those of the parts differ little, as their costs do.
        longest = max(sum(size(tasks[number].shape) for number in part) for part in parts)
        sent = torch.zeros(longest, dtype=torch.bfloat16, device=tasks[0].device)
        if mine:
            torch.cat(mine, out=sent[: sum(map(len, mine))])
        received = sent.new_empty(len(parts) * longest)
        all_gather_tensor(received.view(torch.uint8), sent.view(torch.uint8))
        found: dict[int, Tensor] = {}
        for part, memory in zip(parts, received.split(longest), strict=True):
            found |= zip(part, cut(memory, [tasks[number].shape for number in part]), strict=True)
        yield from (found.pop(number) for number in range(len(tasks)))

    def alone(self, costs: Sequence[float]) -> list[bool]:
        """Returns which of the matrices are this rank's."""
        return [owner == self.ranks.rank for owner in owners(costs, self.ranks.world_size)]


@dataclass(frozen=True)
class Shards(Owners):
    """Every rank has rows of each input, as DTensor and FSDP2 shard them.

    Attributes:
        mesh: a `DeviceMesh`.
        dimension: the dimension of the mesh whose ranks share the rows.
    """

    mesh: Any
    dimension: int

    def results(self, tasks: Sequence[MatrixWork]) -> Iterator[BFloat16[Tensor, "rows columns"]]:
        """See `Owners`. A rank's memory holds its own rows of all matrices, and the matrices that it owns."""
        if not tasks:
            return
        count, rank = self.mesh.size(self.dimension), self.mesh.get_local_rank(self.dimension)
        parts = divided(tasks, count)
        heights = [rows_of(task.shape[0], count) for task in tasks]  # by matrix and rank

        def pieces(numbers: Sequence[int], of: int) -> list[tuple[int, int]]:
            """The shapes of the rows that a rank has of these matrices."""
            return [(heights[number][of], tasks[number].shape[1]) for number in numbers]

        # Rows of the inputs, from every rank to the owners.
        given = self._exchange(
            [[tasks[number].rows() for number in part] for part in parts],
            [pieces(parts[rank], each) for each in range(count)],
            tasks[0].device,
        )
        done = [
            tasks[number].work(torch.cat(rows)).split(heights[number])
            for number, rows in zip(parts[rank], zip(*given, strict=True), strict=True)
        ]
        # Rows of the results, from the owners to every rank.
        back = self._exchange(
            [[rows[each] for rows in done] for each in range(count)],
            [pieces(part, rank) for part in parts],
            tasks[0].device,
        )
        found: dict[int, Tensor] = {}
        for part, rows in zip(parts, back, strict=True):
            found |= zip(part, rows, strict=True)
        yield from (found.pop(number) for number in range(len(tasks)))

    def alone(self, costs: Sequence[float]) -> list[bool]:
        """Returns that it needs the others for each matrix."""
        return [False] * len(costs)

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, int]]], device: torch.device
    ) -> list[list[Tensor]]:
        """Sends bf16 matrices to every rank, and returns what every rank has sent.

        Args:
            sent: by the rank that gets them.
            shapes: of what comes, by the rank that sends it.
        """
        nothing = torch.empty(0, dtype=torch.bfloat16, device=device)
        out = torch.cat([nothing, *(each.flatten() for part in sent for each in part)])
        sizes = [sum(map(size, part)) for part in shapes]
        received = nothing.new_empty(sum(sizes))
        width = nothing.element_size()  # as bytes, which every backend sends
        torch.distributed.all_to_all_single(
            received.view(torch.uint8),
            out.view(torch.uint8),
            [width * each for each in sizes],
            [width * sum(each.numel() for each in part) for part in sent],
            group=self.mesh.get_group(self.dimension),
        )
        return [cut(memory, part) for memory, part in zip(received.split(sizes), shapes, strict=True)]


@contextmanager
def without_owners(optimizer: Any) -> Generator[None]:
    """A context in which this rank does all of an optimizer's work itself, except on sharded matrices."""
    kept = vars(optimizer).pop("owners", None)
    try:
        yield
    finally:
        if kept is not None:
            optimizer.owners = kept


def owners_of(tensor: Any, otherwise: Owners) -> Owners:
    """Returns how the ranks divide work on a matrix: `otherwise`, or as its shards require.

    Raises:
        ConfigError: see `sharded_dimension`.
    """
    if not hasattr(tensor, "device_mesh"):
        return otherwise
    dimension = sharded_dimension(tensor)
    return Owners() if dimension is None else Shards(tensor.device_mesh, dimension)


def sharded_dimension(tensor: Any) -> int | None:
    """Returns the dimension of the mesh whose ranks share a DTensor's rows; None if every rank has all of them.

    Raises:
        ConfigError: it is sharded in another way than by rows over one dimension of the mesh.
    """
    from torch.distributed.tensor import Shard

    sharded = [(number, each) for number, each in enumerate(tensor.placements) if not each.is_replicate()]
    if not sharded:
        return None
    (dimension, placement), *more = sharded
    if more or type(placement) is not Shard or placement.dim != 0:
        raise ConfigError(
            f"a parameter of shape {tuple(tensor.shape)} has the placements {tensor.placements}, but Muon and QK-clip "
            "know rows over one dimension of a mesh only; fix: shard it with fully_shard, by rows"
        )
    return dimension


def own_rows(tensor: Any) -> slice:
    """Returns which rows of a tensor this rank has: all, unless it is a sharded DTensor.

    Raises:
        ConfigError: see `sharded_dimension`.
    """
    dimension = sharded_dimension(tensor) if hasattr(tensor, "device_mesh") else None
    if dimension is None:
        return slice(0, tensor.shape[0])
    mesh = tensor.device_mesh
    ends = [0, *accumulate(rows_of(tensor.shape[0], mesh.size(dimension)))]
    return slice(*ends[mesh.get_local_rank(dimension) :][:2])


def owners(costs: Sequence[float], count: int) -> list[int]:
    """Returns the owner of each piece of work, a rank in [0, count)."""
    loads, found = [0.0] * count, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        found[number] = owner = min(range(count), key=lambda rank: loads[rank])
        loads[owner] += costs[number]
    return found


def divided(tasks: Sequence[MatrixWork], count: int) -> list[list[int]]:
    """Returns the numbers of the matrices of each owner."""
    found: list[list[int]] = [[] for _ in range(count)]
    for number, owner in enumerate(owners([task.cost for task in tasks], count)):
        found[owner].append(number)
    return found


def rows_of(rows: int, count: int) -> list[int]:
    """Returns how many of a tensor's rows each rank has: equally many, except that the last ones have fewer or none."""
    each = -(-rows // count)
    return [max(0, min(each, rows - rank * each)) for rank in range(count)]


def cut(memory: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Returns views of the matrices that lie in `memory`, one after the other."""
    parts = memory[: sum(map(size, shapes))].split([size(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def size(shape: tuple[int, int]) -> int:
    """Returns the number of values."""
    return shape[0] * shape[1]
