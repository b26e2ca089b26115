"""Checks that only a step changes the state: a law of this project. Any other change is a sign of a memory fault.

Weights and moments must have the same checksum after an update and just before the next one. Buffers, which a forward
pass may write, must have the same bits until that forward pass begins. If either differs, memory has changed by itself,
or other code has written it: the gate closes, and the guard restores an older state.

`every` sets how often this is checked: 1 checks between all updates, 10 between one in ten pairs of updates. A change
between other updates is not found.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stabletrain.buffers import SavedBuffers, buffers_of
from stabletrain.checksums import Checksums
from stabletrain.records import Number, TrainState

UNKNOWN = 10
"""Default of `every` for a model whose FLOPs are not known."""

SHARE = 0.005
"""Largest share of a step's time that the check takes by default."""

FLOPS_PER_BYTE = {"cpu": 16.0, "cuda": 240.0}
"""FLOPs of training in the time that summing one byte of the state takes: on two CPU cores, measured by
benchmarks/checksums.py; on an H100, 400 TFLOP/s over half of 3.35 TB/s, because each byte is read twice.
"""


class Change(NamedTuple):
    """A tensor of the state that changed between two updates.

    Attributes:
        what: `parameter`, `buffer`, `average`, or the name of a moment.
        name: name of the parameter or buffer.
        words: which part of the tensor changed.
    """

    what: str
    name: str
    words: str

    def __str__(self) -> str:
        return f"{self.what} {self.name} ({self.words})"


class NoStateCheck:
    """Checks nothing."""

    every = 0

    def before_update(self, state: TrainState, buffers: SavedBuffers) -> Number:
        """Returns 0."""
        return 0.0

    def after_update(self, state: TrainState, buffers: SavedBuffers) -> None:
        """Does nothing."""

    def holds(self, state: TrainState) -> bool:
        """Returns True: nothing is known to have changed."""
        return True

    def reference(self, state: TrainState) -> "Sums | None":
        """Returns None: there are no checksums."""

    def restored(self, state: TrainState, reference: "Sums | None") -> bool:
        """Returns True: nothing is known to have changed."""
        return True

    def put_back_buffers(self) -> None:
        """Does nothing."""

    def changes(self, model: nn.Module) -> list[Change]:
        """Returns no changes."""
        return []


@dataclass(frozen=True)
class Sums:
    """The checksums of a state.

    Attributes:
        at: steps done and steps executed, which identify the state.
        by_device: the sums of the tensors on each device.
        parts: their checksums' layouts.
    """

    at: tuple[int, int]
    by_device: Mapping[torch.device, Tensor]
    parts: Mapping[torch.device, Checksums]

    def equal(self, other: "Sums") -> Tensor:
        """Returns whether all sums are equal; 0-d bool on the first device."""
        found = []
        for device, mine in self.by_device.items():
            theirs = other.by_device.get(device)
            if theirs is None or theirs.shape != mine.shape:  # tensors were added, removed or resized
                found.append(torch.zeros((), dtype=torch.bool, device=device))
            else:
                found.append(torch.eq(mine, theirs).all())
        return found[0] if len(found) == 1 else torch.stack([each.to(found[0].device) for each in found]).all()


class StateCheck(NoStateCheck):
    """Compares the state just before an update with the state after the previous update.

    Attributes:
        every: updates between two comparisons, at least 1.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._parts: dict[torch.device, Checksums] = {}
        self._kept: Sums | None = None
        self._buffers: SavedBuffers | None = None
        self._seen: tuple[Sums, Sums] | None = None
        self._forward: tuple[SavedBuffers, SavedBuffers] | None = None
        self._weights: dict[str, nn.Parameter] = {}
        self._held = 0

    def after_update(self, state: TrainState, buffers: SavedBuffers) -> None:
        """Takes the checksums of the state after a step, if they will be compared before the next update.

        Args:
            state: the state, after the step was counted.
            buffers: the values of its buffers.
        """
        due = state.step % self.every == 0
        self._kept = self._sums(state) if due else None
        self._buffers = buffers if due else None

    def before_update(self, state: TrainState, buffers: SavedBuffers) -> Number:
        """Returns 1 if the state has changed since the last update, 0-d fp32 on its device; 0 without a comparison.

        Args:
            state: the state before the update; nothing should have written it since the last one.
            buffers: the values of its buffers from before the forward pass.
        """
        kept, self._seen, self._forward = self._kept, None, None
        if kept is None or kept.at != at(state):  # the first step, or an older state was restored
            return 0.0
        now = self._sums(state)
        self._seen, same = (kept, now), kept.equal(now)
        if self._buffers is not None:
            self._forward = (self._buffers, buffers)
            same = same & self._buffers.equal(buffers)
        return torch.logical_not(same).float()

    def holds(self, state: TrainState) -> bool:
        """Returns whether the state is unchanged since the last update; waits for the device."""
        return bool(self.before_update(state, buffers_of(state.model).save()) == 0)

    def reference(self, state: TrainState) -> Sums:
        """Returns the checksums that a copy of this state must have; those from after the last update, if known."""
        kept = self._kept
        return kept if kept is not None and kept.at == at(state) else self._sums(state)

    def restored(self, state: TrainState, reference: Sums | None) -> bool:
        """Returns whether a restored state has its checksums; waits for the device.

        Args:
            reference: the checksums from when the state was saved; None if unknown.
        """
        return reference is None or bool(reference.equal(self._sums(state)))

    def put_back_buffers(self) -> None:
        """Restores the buffers' values from after the last update, if the newest comparison found other values.

        A saved state lacks the buffers that the model does not save, so it could not restore these.
        """
        if self._forward is not None and self._forward[0].buffers.tensors:
            good, changed = self._forward
            good.put_back(changed.buffers)

    def changes(self, model: nn.Module) -> list[Change]:
        """Returns the tensors that changed before the newest comparison; waits for the device."""
        found: list[Change] = []
        if self._seen is not None:
            before, after = self._seen
            for device, sums in after.by_device.items():
                old = before.by_device.get(device)
                if old is None or old.shape != sums.shape:
                    found.append(Change("state", "of the optimizer", "tensors were added or removed"))
                    continue
                for name, start, stop in after.parts[device].changed(old.tolist(), sums.tolist()):
                    what, _, which = name.partition(" ")
                    found.append(Change(what, which, f"within its bytes {start} to {stop - 1}"))
        if self._forward is not None:
            before, after = self._forward
            names = [name for name, _ in model.named_buffers()]
            found += [Change("buffer", names[at], "outside of a forward pass") for at in before.changed(after)]
        return found

    @torch.no_grad()
    def _sums(self, state: TrainState) -> Sums:
        groups: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in self._tensors(state).items():
            groups.setdefault(tensor.device, {})[name] = tensor
        for device, tensors in groups.items():
            known = self._parts.get(device)
            if known is None or not known.are_of(tensors):
                self._parts[device] = Checksums(tensors)
        parts = {device: self._parts[device] for device in groups}
        return Sums(at(state), {device: part.sums() for device, part in parts.items()}, parts)

    def _tensors(self, state: TrainState) -> dict[str, Tensor]:
        """Returns weights, moments and averages by `<what> <name>`; of a sharded tensor, this rank's shard."""
        # FSDP replaces a module's shards by gathered weights during a step; the optimizer always holds the shards. So
        # names are looked up before that, and again only if the optimizer gets other parameters.
        held = sum(len(group["params"]) for group in state.optimizer.param_groups)
        if held != self._held:
            self._weights, self._held = dict(state.model.named_parameters()), held
        found: dict[str, Tensor] = {f"parameter {name}": weight for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            moments = state.optimizer.state.get(weight, {})
            found |= {f"{what} {name}": value for what, value in moments.items() if isinstance(value, Tensor)}
        if state.average is not None:
            found |= {f"average {name}": value for name, value in state.average.tensors.items()}
        return {name: part for name, tensor in found.items() for part in plain(tensor)}


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that hold the values of a sharded or otherwise wrapped tensor; a plain tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # since PyTorch 2.15 a DTensor also names its mesh
                yield from plain(part)
    elif tensor.layout == torch.strided and tensor.numel() and not tensor.is_quantized:
        yield tensor


def at(state: TrainState) -> tuple[int, int]:
    """Identifies a state among those of its run."""
    return state.step, state.executed_steps


def default_every(state_bytes: float, step_flops: float | None, device: str) -> int:
    """Returns the smallest `every` at which the check takes at most `SHARE` of a step's time, if the FLOPs are known.

    Args:
        state_bytes: bytes of weights and moments on this device.
        step_flops: FLOPs of one step on this device; None if unknown.
        device: the device's type.
    """
    if not step_flops:
        return UNKNOWN
    both = 2 * state_bytes * FLOPS_PER_BYTE.get(device, FLOPS_PER_BYTE["cuda"])
    return max(1, math.ceil(both / step_flops / SHARE))
