"""Puts a finite fault into a run, as an option of the group `faults`.

faults._target_=tests.reliability.finite.inject.Finite +faults.kind=rows_permuted +faults.at=90 +faults.seed=0
"""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stabletrain.beside.faults.in_data import CorruptedData, CorruptedRows
from stabletrain.beside.faults.in_step import before_each_step
from stabletrain.extension import NoFaults
from stabletrain.records import Batch, TrainState, reads_rows
from tests.reliability.finite.kinds import KINDS
from tests.reliability.finite.subject import Subject


class Finite(NoFaults):
    """One finite fault in a run.

    A tick is the number of steps executed so far; it never repeats, so a fault of state or arithmetic does not come
    back after a rollback. Faults of data belong to data positions, which a rollback leaves out.

    Args:
        kind: a name in `KINDS`.
        at: first tick or data position.
        seed: chooses the place. If it is odd, weights and moments change between backward pass and update, instead of
            before the forward pass.
    """

    def __init__(self, kind: str, at: int, seed: int = 0) -> None:
        self.kind, self.at, self.seed = KINDS[kind], at, seed
        self.fault = self.kind.fault
        self.late = self.kind.group == "memory" and "buffer" not in kind and seed % 2 == 1

    def happens_here(self, number: int) -> bool:
        """Whether the fault acts at this tick or data position."""
        return self.at <= number < self.at + self.kind.steps

    def data(self, data: Any) -> Any:
        """Returns the data with the fault."""
        return CorruptedRows(data, self) if reads_rows(data) else CorruptedData(data, self)  # ty: ignore

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        """Returns the damaged batch."""
        random = torch.Generator().manual_seed(1_000_003 * self.seed + position)
        return self.fault.batch(batch, position, data, random)

    def state(self, state: TrainState, precision: Any) -> None:
        """Sets up the fault in steps."""
        del precision
        subject, waiting = Subject(state, self.seed), list[RemovableHandle]()

        def begin() -> None:
            while waiting:
                waiting.pop().remove()
            tick = state.executed_steps
            if tick == self.at - self.fault.ahead():
                self.fault.remember(subject)
            if self.happens_here(tick):
                waiting.extend(self._begin(subject, tick - self.at))

        before_each_step(state.optimizer, begin)

    def _begin(self, subject: Subject, n: int) -> list[RemovableHandle]:
        """Acts before the forward pass; returns the hooks of this step."""
        if not self.late:
            self.fault.state(subject, n)
        context = contextlib.ExitStack()

        def before(optimizer: Optimizer, *_: Any) -> None:
            context.enter_context(self.fault.update(subject, n))

        def after(optimizer: Optimizer, *_: Any) -> None:
            context.close()

        optimizer = subject.state.optimizer
        return [
            *self.fault.hooks(subject, n),
            *at_end_of_backward(subject.model, lambda: self._end(subject, n)),
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]

    def _end(self, subject: Subject, n: int) -> None:
        """Acts at the end of the backward pass."""
        self.fault.gradients(subject, n)
        if self.late:
            self.fault.state(subject, n)


def at_end_of_backward(model: nn.Module, act: Any) -> list[RemovableHandle]:
    """Returns hooks that call `act()` once, when every trained parameter has its gradient."""
    trained = [each for each in model.parameters() if each.requires_grad]
    missing = {id(each) for each in trained}

    def arrived(parameter: nn.Parameter) -> None:
        missing.discard(id(parameter))
        if not missing:
            missing.add(0)  # never again in this step
            with torch.no_grad():
                act()

    return [each.register_post_accumulate_grad_hook(arrived) for each in trained]
