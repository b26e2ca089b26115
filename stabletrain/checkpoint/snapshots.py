"""Snapshots of the state in host memory, for rollbacks.

All tensors of a snapshot lie in a few flat blocks (`host_copies.py`).

On CUDA a snapshot costs the training no time: parameters, the optimizer's state and the average of the weights are
copied on a stream of their own, while the next forward and backward passes run. They are written by the optimizer or
right after it, so its next step waits for the copy, on the device. Everything else (buffers, a loss scale, statistics
of clipping) is small and may be written earlier, so it is copied at once, on the current stream.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stabletrain.checkpoint.host_copies import host_copies, page_lock, room
from stabletrain.checkpoint.tree import Piece, Tree, is_sharded, local_part, map_tensors
from stabletrain.records import TrainState

GB = 1e9


def tensors_of(tree: Tree, names: Collection[str]) -> tuple[list[Tensor], list[bool]]:
    """Returns the tensors of a captured state in order, and for each whether only the optimizer writes it.

    Args:
        tree: from `capture`.
        names: names of the parameters in `tree["model"]`.
    """
    found: list[Tensor] = []
    only: list[bool] = []

    for key, part in tree.items():
        for name, child in part.items() if key == "model" else [(key, part)]:
            before = len(found)
            map_tensors(found.append, child)
            late = name in names if key == "model" else key in ("optimizer", "average")
            only += [late] * (len(found) - before)
    return found, only


def state_bytes(state: TrainState) -> int:
    """Returns the bytes of a copy of a state; of a sharded one, of this rank's shards.

    Before the first update the moments are estimated: for each parameter two if the optimizer has `betas`, none if its
    `momentum` is 0, else one.
    """
    tensors = list(state.model.state_dict().values())
    tensors += [] if state.average is None else state.average.tensors.values()
    for group in state.optimizer.param_groups:
        moments = 2 if "betas" in group else int(group.get("momentum", 1) != 0)
        for parameter in group["params"]:
            kept = state.optimizer.state.get(parameter)
            tensors += kept.values() if kept else [parameter] * moments
    return sum(room(local_part(tensor)) for tensor in tensors if isinstance(tensor, Tensor))


def choose_memory(
    state: TrainState,
    *,
    snapshots: int,
    checkpoints: int,
    ranks: int,
    free: float,
    fix: str,
    any_rank: Callable[[bool], bool] = bool,
) -> str:
    """Copies states from CUDA to page-locked memory from now on, if the copies of all ranks fit into the host's memory.

    Otherwise they go to pageable memory, which the system may swap; the host then waits for each copy. The choice
    changes no bits.

    Args:
        snapshots: how many of them each rank holds at once.
        checkpoints: how many ranks of this machine hold another copy while a checkpoint is written.
        ranks: number of ranks on this machine, which share its memory.
        free: bytes of host memory that are free on this machine.
        fix: what the user can change.
        any_rank: returns whether its argument is true on any rank. All of them choose the same.

    Returns:
        a line for the user if this machine has too little memory; else empty.
    """
    each, copies = state_bytes(state), ranks * snapshots + checkpoints
    fits = copies * each <= free
    page_lock(not any_rank(not fits))
    if fits:
        return ""
    on_card = next(state.model.parameters()).device.type == "cuda"
    waits = "they are kept in pageable memory, and training waits for each copy"
    return (
        f"memory   {copies} copies of the state for rollbacks and checkpoints, {each / GB:.3g} GB each, need "
        f"{copies * each / GB:.3g} GB of host memory, but {free / GB:.3g} GB are free: "
        f"{waits if on_card else 'the run may be killed'}. fix: {fix}"
    )


class Snapshots:
    """Snapshots of the state in host memory, by step. Of a sharded model, only this rank's shards."""

    def __init__(self) -> None:
        self._trees: dict[int, Tree] = {}
        self._on_card = False
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._waits: Optimizer | None = None
        self._device: torch.device | None = None

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
        own = [local_part(tensor) for tensor in live]
        on_card = [tensor.device.type == "cuda" for tensor in own]
        self._on_card = any(on_card)
        copies = host_copies(own)
        later = [i for i, cuda in enumerate(on_card) if cuda and only[i]]
        for i in {*range(len(own))} - {*later}:
            copies[i].copy_(own[i], non_blocking=on_card[i])
        if later:
            self._copy_beside([copies[i] for i in later], [own[i] for i in later], state.optimizer)
            if not only_optimizer_writes:
                self._before_update()
        each = iter(copies)
        self._trees[step] = map_tensors(lambda tensor: kept(tensor, next(each)), tree)

    def _copy_beside(self, copies: list[Tensor], live: list[Tensor], optimizer: Optimizer) -> None:
        """Copies CUDA tensors on the snapshots' own stream; the optimizer's next step waits for it, on the device."""
        self._device = device = live[0].device
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
            torch.cuda.current_stream(self._device).wait_event(copied)

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
        """Returns the newest snapshot with a step of at most `at_most`, as it lies on the host; None if there is none.

        It has a `Piece` for each sharded tensor.
        """
        if self._on_card:
            # `take` did not wait for its copy. Wait in any case: the caller is about to restore a state.
            torch.cuda.synchronize()
        steps = [step for step in self._trees if step <= at_most]
        return self._trees[max(steps)] if steps else None


def kept(tensor: Any, copy: Tensor) -> Tensor | Piece:
    """Returns what a snapshot keeps of a tensor: its copy, or a `Piece` of a sharded one."""
    return Piece.of(tensor, copy) if is_sharded(tensor) else copy
