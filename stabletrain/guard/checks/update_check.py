"""Checks the values that an optimizer's step wrote: an update is finite, or it is undone.

Finite gradients do not make a finite update: an optimizer may divide by the norm of a zero update, or take the root of
a second moment that is 0. An optimizer that is proven to keep a finite state finite (`optimizers/closed.py`) costs
nothing here. Any other is checked after each step: weights and moments must be finite. If they are not, the step is
undone in one of two ways:

- With `copies`, the bits from before the step are restored immediately. This takes the memory of weights, moments and
  gradients once more, and one host read.
- Without copies, the step's reading reports it (`bad_update`) before the next update is applied. The loop then
  restores a snapshot, replays the steps since, and repeats this step with `copies`. That needs a replay that gives the
  same bits.
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.guard.checks.copies import Copies
from stabletrain.guard.checks.recheck import repeats_exactly
from stabletrain.guard.checks.written import all_finite, kept_outside
from stabletrain.records import Number, TrainState
from stabletrain.stability.optimizers.closed import after_update_is_proven, clipping_is_proven, why_unproven
from stabletrain.stability.step_tools import StepTools


def replays_exactly(model: nn.Module, optimizer: Optimizer, device: torch.device) -> bool:
    """Returns whether steps that are replayed from a snapshot give the same bits, the optimizer's among them."""
    return repeats_exactly(model, device) and not kept_outside(optimizer)


class Unchecked:
    """An update that is not checked.

    Attributes:
        bad: 1 if the update left a value that is not finite, else 0.
        undone: whether the bits from before the update were restored.
        rank: the first rank on which it was bad, -1 if it was bad on none or on all; None in a single process.
    """

    bad: Number = 0.0
    undone = False
    rank: Tensor | None = None

    def judge(self, gate: Tensor) -> Tensor:
        """Judges the update; returns the gate of everything that follows it."""
        return gate


UNCHECKED = Unchecked()


class NoUpdateCheck:
    """Checks no update.

    Attributes:
        copies: whether a bad update is undone immediately, from copies.
        failed: whether an update was bad in this process.
    """

    copies = False
    failed = False

    def of_step(self, state: TrainState, tools: StepTools) -> Unchecked:
        """Returns what checks the step's update: nothing."""
        return UNCHECKED

    def why(self, optimizer: Optimizer) -> str:
        """Returns why this optimizer's updates are checked; empty if they are not."""
        return ""

    def copy(self, model: nn.Module, optimizer: Optimizer) -> Copies | None:
        """Copies nothing."""


class UpdateCheck(NoUpdateCheck):
    """Checks the updates of every optimizer that is not proven to keep a finite state finite."""

    def __init__(self) -> None:
        self.copies, self.failed = True, False
        self._kept: Copies | None = None

    def of_step(self, state: TrainState, tools: StepTools) -> Unchecked:
        """Returns what checks the step's update; call it before gradients are clipped, with the learning rate set."""
        ours = clipping_is_proven(tools.clipping) and after_update_is_proven(tools.after_update)
        if ours and not why_unproven(state.optimizer):
            return UNCHECKED
        return Checked(self, state, tools, self.copy(state.model, state.optimizer))

    def why(self, optimizer: Optimizer) -> str:
        """Returns why this optimizer's updates are checked; empty if they are not."""
        return why_unproven(optimizer)

    def copy(self, model: nn.Module, optimizer: Optimizer) -> Copies | None:
        """Copies what the next step may write, into the memory of the previous copies; None without `copies`."""
        if not self.copies:
            self._kept = None
            return None
        self._kept = self._kept or Copies()
        self._kept.take(model, optimizer)
        return self._kept


class Checked(Unchecked):
    """An update that is checked."""

    def __init__(self, check: UpdateCheck, state: TrainState, tools: StepTools, copies: Copies | None) -> None:
        self._check, self._state, self._tools, self._copies = check, state, tools, copies
        clipping = getattr(tools.clipping, "state_dict", dict)() if copies is not None else {}
        self._clipping = {name: each.clone() if isinstance(each, Tensor) else each for name, each in clipping.items()}

    @torch.no_grad()
    def judge(self, gate: Tensor) -> Tensor:
        """Judges the update, and undoes it if it is bad and there are copies; returns the gate of what follows."""
        bad = (gate & ~all_finite(self._state.model, self._state.optimizer, gate.device)).float()
        self.bad, self.rank = self._tools.parallel.on_any_rank(bad)
        if self._copies is None:
            return gate & (self.bad == 0)
        if self.bad:
            self.undone = self._check.failed = True
            self._copies.put_back()
            if self._clipping:
                self._tools.clipping.load_state_dict(self._clipping)
            return torch.zeros_like(gate)
        return gate
