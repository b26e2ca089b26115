"""What changes the weights after an update: QK-clip, output embedding centering, or both in turn."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor, nn

LARGEST_INITIAL_WEIGHT = 1e17
"""Bound of the weights before the first step, and of what a change after an update may write, for the proofs of
`optimizers/closed.py`."""


@dataclass(frozen=True)
class AfterUpdate:
    """Leaves the weights as the update left them. Base class of all kinds, and what each must offer."""

    def maxima(self, model: nn.Module) -> list[Tensor]:
        """Returns this rank's maxima, which the caller replaces in place by those of all ranks: none."""
        return []

    def __call__(self, model: nn.Module, gate: Bool[Tensor, ""]) -> None:
        """Changes the weights after the update, if `gate` is open; must not synchronize with the host. Does nothing."""


@dataclass(frozen=True)
class InTurn(AfterUpdate):
    """Several of them, one after another."""

    parts: tuple[AfterUpdate, ...]

    def maxima(self, model: nn.Module) -> list[Tensor]:
        """Returns the maxima of all."""
        return [each for part in self.parts for each in part.maxima(model)]

    def __call__(self, model: nn.Module, gate: Bool[Tensor, ""]) -> None:
        """Calls each."""
        for part in self.parts:
            part(model, gate)
