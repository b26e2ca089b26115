"""A burst of the learning rate: for some ticks every update is taken with a multiple of what schedule and guard chose.

The optimizer's groups hold the burst only while the update is taken; what is logged and saved is the rate as planned.
"""

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.faults.planned import check_at_least, check_number, say
from stabletrain.faults.step import OfStep, Removable
from stabletrain.records import TrainState


@dataclass(frozen=True)
class LearningRate(OfStep):
    """A multiple of the learning rate for some ticks.

    Attributes:
        factor: above 0.
        length: ticks from each of `at` on.
    """

    factor: float = 100.0
    length: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor)
        check_at_least("length", self.length, 1)
        if not self.factor > 0:
            raise ConfigError(f"faults.factor={self.factor} is not above 0: 100 is a burst")

    def hits(self, number: int) -> bool:
        return self.here() and any(start <= number < start + self.length for start in self.at)

    def strike(self, state: TrainState, precision: Any) -> list[Removable]:
        tick, planned = state.tick, []

        def raise_rates(optimizer: Optimizer, *_: Any) -> None:
            say(f"learning rate x {self.factor:g} at tick {tick}")
            for group in optimizer.param_groups:
                planned.append(group["lr"])
                group["lr"] = group["lr"] * self.factor

        def put_back(optimizer: Optimizer, *_: Any) -> None:
            for group, rate in zip(optimizer.param_groups, planned, strict=True):
                group["lr"] = rate
            planned.clear()

        return [
            state.optimizer.register_step_pre_hook(raise_rates),
            state.optimizer.register_step_post_hook(put_back),
        ]
