"""When a fault happens: at planned numbers, on all ranks or on one, and at the same numbers in every repetition.

Nothing is remembered of what has happened. Whether a fault happens, and to which element, is a function of the number,
the rank and the option's values; so a run that is resumed, or that goes back, meets the faults it would have met.

No faults: every object stays the one that was built.
"""

import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stabletrain.checkpoint.tree import is_sharded
from stabletrain.errors import ConfigError
from stabletrain.records import TrainState


class NoFaults:
    """Nothing is injected: what is given comes back, identically, and the state is left alone."""

    def data(self, data: Any) -> Any:
        """The data set a run reads: an object with `batch(step, size, split)`."""
        return data

    def checkpoints(self, checkpoints: Any) -> Any:
        """The run's checkpoints; see `checkpoint/checkpoints.py`."""
        return checkpoints

    def wandb(self, wandb: Any) -> Any:
        """The run's W&B; see `tracking/wandb.py`."""
        return wandb

    def state(self, state: TrainState, precision: Any) -> None:
        """The state a run trains and the precision it trains in, once both are on their device."""
        del state, precision


@dataclass(frozen=True)
class Planned(NoFaults):
    """A fault that happens at planned numbers.

    Attributes:
        at: the numbers, from 0. What they count, each kind says.

    Raises:
        ConfigError: there is none, or one is not a whole number from 0 on.
    """

    at: Sequence[int]

    def __post_init__(self) -> None:
        if not isinstance(self.at, Sequence) or isinstance(self.at, str):
            raise ConfigError(f"faults.at={self.at} is not a list: write [{self.at}]")
        if not self.at:
            raise ConfigError("faults.at=[] plans nothing: name a step, as in faults.at=[100], or use faults=none")
        for number in self.at:
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ConfigError(f"faults.at={list(self.at)}: {number} is not a whole number from 0 on")


@dataclass(frozen=True)
class OnRank(Planned):
    """A fault that one process alone may meet.

    Attributes:
        rank: the only rank to meet it; None for every rank.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("rank", self.rank, 0)

    def hits(self, number: int) -> bool:
        """Whether it happens at `number` in this process (whose rank is RANK in the environment, 0 without)."""
        return number in self.at and self.on_this_rank()

    def on_this_rank(self) -> bool:
        """Whether this process is to meet it."""
        return self.rank is None or self.rank == int(os.environ.get("RANK", "0"))


def check_at_least(name: str, value: Any, lowest: int) -> None:
    """Refuses a value that is no whole number from `lowest` on; None passes."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < lowest):
        raise ConfigError(f"faults.{name}={value} is not a whole number from {lowest} on")


def check_number(name: str, value: Any) -> None:
    """Refuses a value that is no number; NaN and the infinities are numbers here."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise ConfigError(f"faults.{name}={value} is not a number: write .nan, .inf, -.inf, or one such as 1000.0")


def drawn(seed: int, number: int, below: int) -> int:
    """A whole number in [0, below), drawn by seed and number."""
    return random.Random(f"{seed}/{number}").randrange(below)


def own(tensor: Any) -> Tensor:
    """The part of a sharded tensor that this rank holds, of which it can write alone; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def place(tensor: Tensor, seed: int, number: int) -> tuple[int, ...]:
    """One element of `tensor`, drawn by seed and number, as an index for each dimension."""
    element, index = drawn(seed, number, tensor.numel()), []
    for size in reversed(tensor.shape):
        element, here = divmod(element, size)
        index.append(here)
    return tuple(reversed(index))


def writable(value: float, dtype: torch.dtype) -> float | int:
    """`value` as a tensor of whole numbers can hold it: one far beyond every id stands for NaN and Inf."""
    if dtype.is_floating_point or dtype.is_complex:
        return value
    return int(value) if math.isfinite(value) else min(2**31 - 1, torch.iinfo(dtype).max)


def say(what: str) -> None:
    """One line for people, when a fault happens."""
    print(f"stabletrain: fault injected: {what}", file=sys.stderr)
