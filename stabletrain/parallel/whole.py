"""The whole weights of the present and of an older state, for replays that run without the other ranks.

With one process or DDP, every rank has them. With FSDP they are gathered on every rank:

    check            compares the memory that this takes with the free memory; allocates nothing
    prepare          allocates the memory
    gather           communicates

The same three exist for the older state. `check` and `prepare` may raise on one rank only. The ranks must therefore
agree after each of them, and gather together or not at all. An error within `gather` is raised at its end: until then,
the rank goes on sending its shards, because the other ranks wait for them.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.checkpoint.tree import Piece, Tree, local_part
from stabletrain.errors import StabletrainError
from stabletrain.machine.memory import free_host_memory
from stabletrain.parallel.ranks import Ranks, all_gather_tensor, host_group

WEIGHTS_IN_REPLAY = 5
"""Free memory that replays need, in multiples of the weights: the model, a copy, gradients and working memory."""

GB = 1e9


def free_on_card() -> float:
    """Returns the free bytes of the card, including those that PyTorch has reserved but does not use."""
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return float(torch.cuda.mem_get_info()[0] + unused)


class NotEnoughMemory(StabletrainError):
    """This rank cannot hold the whole weights."""


class WholeState:
    """The states of a model that is whole on every rank: nothing is gathered.

    Args:
        model: the model in training.
        older: returns a captured state from before the step; None if none is left.
    """

    def __init__(self, model: nn.Module, older: Callable[[], Tree | None]) -> None:
        self._model, self._older = model, older

    def check(self) -> None:
        """Raises NotEnoughMemory if this rank cannot hold the gathered state."""

    def prepare(self) -> None:
        """Allocates what `gather` needs."""

    def gather(self) -> nn.Module:
        """Returns the model with whole weights."""
        return self._model

    def prepare_older(self) -> None:
        """Allocates what `gather_older` needs."""

    def gather_older(self) -> Tree | None:
        """Returns the older state with whole tensors; None if none is left."""
        return self._older()


class GatheredState(WholeState):
    """The states of a model that FSDP shards. `gather` and `gather_older` are collectives.

    Args:
        model: the sharded model.
        older: as in `WholeState`, with a `Piece` for each sharded tensor.
        model_factory: creates an unsharded model, with any weights.
        ranks: this process among those that share the weights.
    """

    def __init__(
        self, model: nn.Module, older: Callable[[], Tree | None], model_factory: Callable[[], nn.Module], ranks: Ranks
    ) -> None:
        super().__init__(model, older)
        self._model_factory, self._ranks = model_factory, ranks
        self._copy: nn.Module | None = None
        self._gather: Gather | None = None
        self._tree: Tree | None = None

    def check(self) -> None:
        """Compares sizes with the free memory of the card and of the host, which the ranks of a machine share.

        Raises:
            NotEnoughMemory: the present weights and those of the older state do not fit.
        """
        parameters = list(self._model.parameters())
        weights = sum(nbytes(parameter) for parameter in parameters)
        buffer = sum(Gather.sizes(parameters, self._ranks.world_size))
        host = weights + buffer  # a model is created on the host, and the older state stays there
        if parameters[0].device.type == "cuda":
            require_memory("the card", WEIGHTS_IN_REPLAY * weights, free_on_card())
        else:
            host += WEIGHTS_IN_REPLAY * weights
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self._ranks.world_size))
        require_memory(f"the host, for the {here} ranks of this machine together", here * host, free_host_memory())

    def prepare(self) -> None:
        """Creates the model that receives the weights, and the buffers to send and receive them."""
        live = self._model
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            self._copy = self._model_factory()
        with torch.no_grad():  # buffers are whole on every rank
            for mine, buffer in zip(self._copy.buffers(), live.buffers(), strict=True):
                mine.copy_(buffer)
        self._gather = Gather(dict(live.named_parameters()), dict(self._copy.named_parameters()), self._ranks)

    def gather(self) -> nn.Module:
        """Returns a model of its own with whole weights. All ranks must call it after `prepare`."""
        assert self._copy is not None
        assert self._gather is not None, "prepare comes first"
        gather, self._gather = self._gather, None
        gather.run()
        return self._copy

    def prepare_older(self) -> None:
        """Finds the older state, and allocates host memory for its weights."""
        tree = self._older()
        if tree is None:
            return
        pieces = {name: value for name, value in tree["model"].items() if isinstance(value, Piece)}
        whole = {name: torch.empty(piece.shape, dtype=piece.local.dtype) for name, piece in pieces.items()}
        self._gather = Gather(pieces, whole, self._ranks)
        self._tree = {"model": {**tree["model"], **whole}, "step": tree["step"]}

    def gather_older(self) -> Tree | None:
        """Returns step number, weights and buffers of the older state, on the host, without moments.

        All ranks must call it after `prepare_older`.
        """
        gather, self._gather = self._gather, None
        if gather is not None:
            gather.run()
        return self._tree


def require_memory(where: str, needed: float, free: float) -> None:
    """Raises NotEnoughMemory if less than `needed` bytes are free."""
    if free < needed:
        raise NotEnoughMemory(
            f"replays need the whole weights on every rank, {needed / GB:.3g} GB on {where}, but only "
            f"{free / GB:.3g} GB are free"
        )


class Gather:
    """Gathers sharded tensors, one at a time, over the hosts' network (gloo), where an error can be handled.

    All memory is allocated here, so that no rank runs out of it while the others wait.

    Args:
        shards: DTensors or `Piece`s by name, sharded by rows; the same names and shapes on every rank, in one order.
        targets: receive the whole tensors, on any device.
        ranks: this process among those that share the tensors.
    """

    def __init__(self, shards: Mapping[str, Any], targets: Mapping[str, Tensor], ranks: Ranks) -> None:
        missing = shards.keys() - targets.keys()
        if missing:
            raise ValueError(f"the model built for the replay lacks '{min(missing)}'")
        self._shards, self._targets, self._count = shards, targets, ranks.world_size
        sent, received = self.sizes(shards.values(), ranks.world_size)
        self._send, self._receive = torch.empty(sent, dtype=torch.uint8), torch.empty(received, dtype=torch.uint8)

    @staticmethod
    def sizes(shards: Iterable[Any], count: int) -> tuple[int, int]:
        """Returns the bytes of the buffers for sending and receiving."""
        largest = max((rows(shard, count) * row_bytes(shard) for shard in shards), default=0)
        return largest, count * largest

    @torch.no_grad()
    def run(self) -> None:
        """Gathers every tensor. Raises the first error at the end, because the others wait for each collective."""
        raised: Exception | None = None
        for name, shard in self._shards.items():
            size = rows(shard, self._count) * row_bytes(shard)
            if not size:
                continue
            send, receive = self._send[:size], self._receive[: self._count * size]
            try:
                self._pack(send, shard)
            except Exception as error:
                raised = raised or error
            all_gather_tensor(receive, send, host_group(self._count))
            try:
                self._unpack(receive, shard, self._targets[name])
            except Exception as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def _pack(self, send: Tensor, shard: Any) -> None:
        """Copies this rank's shard into the buffer. The rest of the buffer pads it to the size of the largest shard."""
        local = local_part(shard)
        if local.numel():
            whole = local.contiguous().flatten().view(torch.uint8)
            send[: whole.numel()].copy_(whole)

    def _unpack(self, receive: Tensor, shard: Any, target: Tensor) -> None:
        """Copies the gathered rows into the target."""
        local = local_part(shard)
        size = math.prod(shard.shape) * local.element_size()
        target.copy_(receive[:size].view(local.dtype).view(shard.shape))


def rows(shard: Any, count: int) -> int:
    """Returns how many rows of a tensor the first rank has, which no other rank exceeds."""
    return -(-shard.shape[0] // count)


def row_bytes(shard: Any) -> int:
    """Returns the size of one row in bytes."""
    return math.prod(shard.shape[1:]) * local_part(shard).element_size()


def nbytes(tensor: Tensor) -> int:
    """Returns the size of a whole tensor in bytes, also if it is sharded."""
    return tensor.numel() * tensor.element_size()
