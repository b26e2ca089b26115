"""Snapshots of the state in host memory, for rollbacks.

All tensors of a snapshot lie in a few flat blocks. On CUDA the blocks are page-locked, so that the copy runs beside the
training, and each has a power of two bytes: PyTorch rounds page-locked memory up to that, so a block for each tensor
would take 1.76 times the bytes of GPT-2's state. Elsewhere one block holds exactly the state.

On CUDA a snapshot costs the training no time: parameters and the optimizer's state are copied on a stream of their own,
while the next forward and backward passes run. Only the optimizer writes them, so its next step waits for the copy, on
the device. Everything else (buffers, a loss scale, statistics of clipping) is small and may be written earlier, so it
is copied at once, on the current stream.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stabletrain.checkpoint.tree import Piece, Tree, attach_shards, is_sharded, map_tensors
from stabletrain.records import TrainState

ALIGNED = 256
"""Every tensor begins at a multiple of so many bytes of its block."""

SLACK = 16
"""No more than one in so many bytes of page-locked blocks is unused, if the tensors can be placed so well."""


def room(tensor: Tensor) -> int:
    """Returns the bytes that a tensor takes in a block."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def places(sizes: Sequence[int], rounded: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Places tensors in blocks.

    Args:
        sizes: bytes of each tensor, multiples of `ALIGNED`.
        rounded: whether a block takes a power of two bytes whatever its size; else one block holds everything.

    Returns:
        the bytes of each block, and the block and first byte of each tensor.
    """
    blocks: list[int] = []
    found: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    left = sorted(range(len(sizes)), key=lambda i: -sizes[i])  # large tensors first, the small ones fill the gaps
    whole = sum(sizes)
    while left:
        missing = sum(sizes[i] for i in left)
        size = missing
        if rounded:
            size = 1 << (missing - 1).bit_length() if missing else 0
            if size - missing > whole // SLACK:  # rounded down instead, if the largest tensor fits; the rest follows
                size = max(size // 2, 1 << (sizes[left[0]] - 1).bit_length())
        end, rest = 0, []
        for i in left:
            if end + sizes[i] <= size:
                found[i], end = (len(blocks), end), end + sizes[i]
            else:
                rest.append(i)
        blocks.append(size)
        left = rest
    return blocks, found


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous, uninitialised host tensors of the same shapes and dtypes, in few blocks.

    They are page-locked if the first tensor is on CUDA.
    """
    pinned = bool(tensors) and tensors[0].device.type == "cuda"
    sizes, where = places([room(tensor) for tensor in tensors], pinned)
    blocks = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for size in sizes]

    def view(tensor: Tensor, block: int, start: int) -> Tensor:
        taken = blocks[block][start : start + tensor.numel() * tensor.element_size()]
        return taken.view(tensor.dtype).view(tensor.shape)

    return [view(tensor, *place) for tensor, place in zip(tensors, where, strict=True)]


def tensors_of(tree: Tree, names: Collection[str]) -> tuple[list[Tensor], list[bool]]:
    """Returns the tensors of a captured state in order, and for each whether only the optimizer writes it.

    Args:
        tree: from `capture`.
        names: names of the parameters in `tree["model"]`.
    """
    found: list[Tensor] = []
    only: list[bool] = []

    def collect(part: Tree, mine: bool) -> None:
        before = len(found)
        map_tensors(lambda tensor: found.append(tensor), part)
        only.extend([mine] * (len(found) - before))

    for key, part in tree.items():
        if key == "model":
            for name, tensor in part.items():
                collect(tensor, name in names)
        else:
            collect(part, key == "optimizer")
    return found, only


class Snapshots:
    """Snapshots of the state in host memory, by step. Of a sharded model, only this rank's shards."""

    def __init__(self) -> None:
        self._trees: dict[int, Tree] = {}
        self._on_card = False
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._waits: Optimizer | None = None

    def take(self, step: int, tree: Tree, state: TrainState, *, only_optimizer_writes: bool = True) -> None:
        """Copies a captured state, taken after `step` steps, to the host. The host does not wait for CUDA.

        Args:
            tree: from `capture(state, ...)`.
            only_optimizer_writes: whether nothing else writes parameters and moments before the next
                `state.optimizer.step()`. If not, as in a loop of the user's own that clamps or averages weights, all
                later work of the device waits for the copy.
        """
        names = {name for name, _ in state.model.named_parameters(remove_duplicate=False)}
        live, only = tensors_of(tree, names)
        own = [(tensor.to_local() if is_sharded(tensor) else tensor).detach() for tensor in live]  # ty: ignore[missing-attribute]
        on_card = [i for i, tensor in enumerate(own) if tensor.device.type == "cuda"]
        on_host = [i for i, tensor in enumerate(own) if tensor.device.type != "cuda"]
        self._on_card = bool(on_card)
        copies: dict[int, Tensor] = {}
        for group in (on_card, on_host):
            copies |= zip(group, host_copies([own[i] for i in group]), strict=True)
        for i in [*on_host, *(i for i in on_card if not only[i])]:
            copies[i].copy_(own[i], non_blocking=i in on_card)
        if later := [i for i in on_card if only[i]]:
            self._copy_beside([copies[i] for i in later], [own[i] for i in later], state.optimizer)
            if not only_optimizer_writes:
                self._before_update()
        each = iter(range(len(live)))
        self._trees[step] = map_tensors(lambda tensor: kept(tensor, own, copies, each), tree)

    def _copy_beside(self, copies: list[Tensor], live: list[Tensor], optimizer: Optimizer) -> None:
        """Copies CUDA tensors on the snapshots' own stream; the optimizer's next step waits for it, on the device."""
        device = live[0].device
        if self._waits is not optimizer:
            optimizer.register_step_pre_hook(self._before_update)
            self._waits = optimizer
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the last update has to be complete
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(copies, live, strict=True):
                copy.copy_(tensor, non_blocking=True)
                # If the state drops this tensor, its memory must not be used again before it is copied.
                tensor.record_stream(self._stream)
        self._copied = self._stream.record_event()

    def _before_update(self, *_: Any) -> None:
        """Makes the current stream wait for the last snapshot's copy."""
        copied, self._copied = self._copied, None
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)

    def retain(self, steps: Iterable[int]) -> None:
        """Drops all snapshots except those of `steps`; their memory serves the next ones."""
        wanted = set(steps)
        self._trees = {step: tree for step, tree in self._trees.items() if step in wanted}

    def drop(self, step: int) -> None:
        """Drops the snapshot of a step."""
        self._trees.pop(step, None)

    def reaches(self, step: int) -> bool:
        """Returns whether there is a snapshot of at most `step` steps."""
        return any(taken <= step for taken in self._trees)

    def newest(self, at_most: int) -> Tree | None:
        """Returns the newest snapshot with a step of at most `at_most`, with its shards in new memory on their device.

        Returns None if there is none.
        """
        return attach_shards(self.newest_on_host(at_most))

    def newest_on_host(self, at_most: int) -> Tree | None:
        """Returns the same snapshot as it is kept, with a `Piece` for each sharded tensor."""
        if self._on_card:
            # `take` did not wait for its copy. Wait in any case: the caller is about to restore a state.
            torch.cuda.synchronize()
        steps = [step for step in self._trees if step <= at_most]
        return self._trees[max(steps)] if steps else None


def kept(tensor: Any, own: Sequence[Tensor], copies: Mapping[int, Tensor], each: Iterator[int]) -> Tensor | Piece:
    """Returns what a snapshot keeps of the next tensor: its copy, or a `Piece` of a sharded one."""
    i = next(each)
    if not is_sharded(tensor):
        return copies[i]
    return Piece(copies[i], tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), own[i].device)
