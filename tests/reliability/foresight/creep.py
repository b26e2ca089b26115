"""A schedule whose learning rate grows by a constant factor in every step."""

from dataclasses import dataclass

from stabletrain.stability.schedule import Constant

STEPS = 1200
"""Length of the runs that use it."""


@dataclass(frozen=True)
class Creep(Constant):
    """Grows by `growth` a step.

    Attributes:
        growth: relative growth a step; 0: constant.
    """

    growth: float = 0.0

    def factor(self, progress: float) -> float:
        """Returns `(1 + growth) ** (steps after warmup)`."""
        return (1 + self.growth) ** (progress * STEPS)
