"""Compares the arithmetic of ranks: in a repeated step, each also computes the first micro-batch of the next rank.

A card that always computes the same wrong number repeats it faithfully, so `recheck.py` alone finds nothing. With
`recheck_across=ranks` all ranks shift by one micro-batch together: rank k runs that of rank k + 1 from the same weights
and buffers, with that rank's random numbers, and loss and gradient must have the bits that rank k + 1 got itself.

A rank that computes wrongly stands in two of these pairs. So with three ranks or more it is the one rank that both
pairs which differ have in common. If a single pair differs, rank k + 1 has computed its micro-batch twice with the same
bits, and rank k once with others: rank k is named, with less certainty. With FSDP the second of the three is missing,
and if both pairs of two ranks differ, the bits do not tell either: both ranks are then named as suspects.

Bits can be equal only where the machines are: if the ranks have different cards or libraries, if they have batches of
different sizes, or if kernels may add in another order, nothing is compared, and one line says so.

What is sent in such a step, and in no other: an object of some KiB between the hosts, the micro-batch to one rank, and
two checksums for each tensor.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from stabletrain.guard.checks.comparing import sums
from stabletrain.machine import hardware
from stabletrain.machine.determinism import Generators
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch

MODES = ("none", "ranks")
"""Values of `recheck_across`."""

UNLIKE = {
    "exact": "kernels of this run may add in another order; fix: determinism=strict",
    "machine": "the ranks have different cards or libraries, whose bits differ without a fault",
    "shapes": "their micro-batches differ in size",
}
"""Why ranks are not compared, by the field of `Setting` that says so."""


class Setting(NamedTuple):
    """What must be the same on two ranks if their bits are to be equal.

    Attributes:
        exact: whether the same computation gives the same bits on this machine.
        machine: card or processor, versions and threads.
        shapes: shapes and dtypes of inputs and targets.
    """

    exact: bool
    machine: tuple[str, ...]
    shapes: str


@dataclass(frozen=True)
class Table:
    """What the ranks computed in one step.

    Attributes:
        names: of the loss and of the tensors with a gradient.
        bits: int64 `[ranks, 2, names]`, on the device: of each rank's own micro-batch, and of the next rank's, computed
            on this rank; sums of the bits.
        repeated: whether each rank has also computed its own micro-batch twice, with the same bits.
    """

    names: Sequence[str]
    bits: Tensor
    repeated: bool

    @property
    def unequal(self) -> Tensor:
        """Bool `[ranks, names]`: whether rank k computed other bits than rank k + 1 for the micro-batch of k + 1."""
        return self.bits[:, 1] != self.bits[:, 0].roll(-1, 0)


class Blame(NamedTuple):
    """Who may have computed wrongly, on the host.

    Attributes:
        suspects: the rank that computed wrongly, or several of which one or more did.
        pairs: `(k, k + 1)` for each pair that differs.
        names: what differs in them.
    """

    suspects: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    names: Sequence[str]


def blame(table: Table) -> Blame | None:
    """Returns who may be at fault; None if all bits agree. Waits for the device."""
    unequal = table.unequal.cpu()
    ranks, differing = len(unequal), unequal.any(dim=1).nonzero().flatten().tolist()
    if not differing:
        return None
    pairs = [(rank, (rank + 1) % ranks) for rank in differing]
    names = [name for name, found in zip(table.names, unequal.any(dim=0).tolist(), strict=True) if found]
    if len(pairs) == 1 and table.repeated:  # rank k + 1 got its own bits twice
        return Blame([pairs[0][0]], pairs, names)
    common = [rank for rank in range(ranks) if all(rank in pair for pair in pairs)]
    return Blame(common or sorted({rank for pair in pairs for rank in pair}), pairs, names)


@cache
def machine_of(device: torch.device) -> tuple[str, ...]:
    """Returns what decides the bits of a result: card or processor, versions and number of threads."""
    versions = (torch.__version__, str(torch.version.cuda))
    if device.type == "cuda":
        return (hardware.card(device), *versions, str(torch.backends.cudnn.version()))
    return (platform.machine(), *sorted(hardware.cpu_flags()), *versions, hardware.threads())


def why_unlike(settings: Sequence[Setting]) -> str:
    """Returns why the bits of these ranks cannot be compared; empty if they can."""
    if not all(each.exact for each in settings):
        return UNLIKE["exact"]
    return next((UNLIKE[name] for name in ("machine", "shapes") if len({getattr(e, name) for e in settings}) > 1), "")


Result = Sequence[Tensor | None] | None
"""A micro-batch's loss and gradients; None if memory did not suffice."""


def checksums(result: Result, device: torch.device) -> Tensor | None:
    """Returns the sums of the bits, int64 `[names]`; None without a result."""
    return None if result is None else sums(result, device)


class NoShift:
    """Compares no ranks."""

    def judged(
        self,
        difference: Tensor,
        batch: Batch,
        generators: Generators,
        run: Callable[[Batch, Generators], Result],
        own: Callable[[], Result],
        names: Sequence[str],
        *,
        repeated: bool,
    ) -> Tensor:
        """Returns `difference`, 0-d fp32, equal on all ranks: inf if two ranks differ, -1 if memory did not suffice.

        All ranks must call it.

        Args:
            difference: what the repetition on one rank found.
            batch: this rank's micro-batch, on the device.
            generators: states of this rank's random generators before it.
            run: computes a micro-batch from such states.
            own: returns the result of this rank's micro-batch.
            names: of the tensors in a result.
            repeated: whether this rank has also computed its own micro-batch twice, and compared.
        """
        return difference


NO_SHIFT = NoShift()


@dataclass(frozen=True)
class Shift(NoShift):
    """Computes the next rank's micro-batch in one step, and compares the bits.

    Attributes:
        parallel: the ranks.
        exact: whether the same computation gives the same bits on this machine.
        due: whether the step is judged, and not a rehearsal.
        keep: gets the table, or why there is none.
    """

    parallel: SingleProcess
    exact: bool
    due: bool
    keep: Callable[[Table | str], None]

    def judged(
        self,
        difference: Tensor,
        batch: Batch,
        generators: Generators,
        run: Callable[[Batch, Generators], Result],
        own: Callable[[], Result],
        names: Sequence[str],
        *,
        repeated: bool,
    ) -> Tensor:
        """See `NoShift`."""
        device, shapes = generators.device, [(each.shape, each.dtype) for each in (batch.inputs, batch.targets)]
        # The random states travel too, so it does not matter how a run seeds its steps.
        everyones = self.parallel.gather((Setting(self.exact, machine_of(device), repr(shapes)), generators))
        if unlike := why_unlike([setting for setting, _ in everyones]):
            self.keep(unlike)
            return difference
        theirs = replace(everyones[(self.parallel.ranks.rank + 1) % len(everyones)][1], device=device)
        inputs, targets = self.parallel.from_next_rank([batch.inputs, batch.targets])
        shifted = replace(batch, inputs=inputs, targets=targets, ids=None, sources=None)
        shifted = replace(shifted, input_range=None, target_range=None)
        # One result at a time: only its checksums are kept.
        here, found = checksums(own(), device), checksums(run(shifted, theirs), device)
        row = torch.zeros(1 + 2 * len(names), dtype=torch.int64, device=device)
        if here is None or found is None:
            row[0] = 1
        else:
            row[1:] = torch.cat([here, found])
        rows = self.parallel.all_gather(row)
        table = Table(names, rows[:, 1:].view(len(rows), 2, len(names)), repeated)
        self.keep(table)
        if self.due:
            difference = torch.where(table.unequal.any(), torch.inf, difference)
        return torch.where(rows[:, 0].any(), -1.0, difference)
