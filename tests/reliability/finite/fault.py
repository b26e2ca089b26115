"""What every finite fault is: methods that act at some moments of a step, none of which does anything by default."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from stabletrain.records import Batch
from tests.reliability.finite.subject import Subject


@dataclass(frozen=True)
class Fault:
    """A fault that lasts some steps; `n` is the number of the step in the fault, from 0.

    A subclass overrides the moments at which it acts.
    """

    def ahead(self) -> int:
        """Returns how many steps before the fault `remember` is called."""
        return 0

    def remember(self, subject: Subject) -> None:
        """Keeps what the fault will need."""

    def state(self, subject: Subject, n: int) -> None:
        """Changes weights, moments or buffers between two updates."""

    def gradients(self, subject: Subject, n: int) -> None:
        """Changes gradients at the end of the backward pass, before they are measured."""

    def hooks(self, subject: Subject, n: int) -> list[RemovableHandle]:
        """Returns hooks on modules for this step."""
        return []

    def update(self, subject: Subject, n: int) -> AbstractContextManager:
        """Returns a context around the optimizer's update."""
        return contextlib.nullcontext()

    def batch(self, batch: Batch, position: int, data: Any, random: torch.Generator) -> Batch:
        """Returns the training batch of a data position, changed."""
        return batch
