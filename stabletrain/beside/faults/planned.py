"""Base classes of faults: faults happen at planned numbers, on all ranks or on one.

Whether a fault happens, and in which element, depends only on the number, the rank and the option's values. A run that
is resumed or rolled back therefore has the same faults.
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

from stabletrain import printable
from stabletrain.checkpoint.tree import is_sharded
from stabletrain.errors import ConfigError
from stabletrain.extension import NoFaults


@dataclass(frozen=True)
class Planned(NoFaults):
    """A fault that happens at planned numbers.

    Attributes:
        at: the numbers, from 0; each kind defines what they count.
    """

    at: Sequence[int]

    def __post_init__(self) -> None:
        if not isinstance(self.at, Sequence) or isinstance(self.at, str):
            raise ConfigError(f"faults.at={self.at} is not a list: write [{self.at}]")
        if not self.at:
            raise ConfigError("faults.at=[] plans nothing: name a step, as in faults.at=[100], or use faults=none")
        for number in self.at:
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ConfigError(
                    f"faults.at={list(self.at)}: {number} is not a whole number of at least 0; fix: faults.at=[100]"
                )


@dataclass(frozen=True)
class OnRank(Planned):
    """A fault on one rank or on all ranks.

    Attributes:
        rank: the only rank that has the fault; None for every rank.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("rank", self.rank, 0)

    def happens_at(self, number: int) -> bool:
        """Whether the fault happens at `number` on any rank."""
        return number in self.at

    def happens_here(self, number: int) -> bool:
        """Whether the fault happens at `number` in this process."""
        return self.happens_at(number) and self.on_this_rank()

    def on_this_rank(self) -> bool:
        """Whether this process has the fault; its rank is the environment's RANK, or 0 if that is not set."""
        return self.rank is None or self.rank == int(os.environ.get("RANK", "0"))


@dataclass(frozen=True)
class BadNumber(OnRank):
    """A fault that writes a number.

    Attributes:
        value: the number.
    """

    value: float = float("nan")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("value", self.value)


@dataclass(frozen=True)
class Multiplied(OnRank):
    """A fault that multiplies values, at several planned numbers in a row.

    Attributes:
        factor: what they are multiplied by.
        length: how many in a row, beginning at each of `at`.
    """

    factor: float = 100.0
    length: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor)
        check_at_least("length", self.length, 1)

    def happens_at(self, number: int) -> bool:
        """Whether the fault happens at `number`, which may be later than one of `at`."""
        return any(start <= number < start + self.length for start in self.at)


def check_at_least(name: str, value: Any, lowest: int) -> None:
    """Raises ConfigError if `value` is neither None nor an integer of at least `lowest`."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < lowest):
        raise ConfigError(
            f"faults.{name}={value} is not a whole number of at least {lowest}; fix: faults.{name}={lowest} or more"
        )


def check_number(name: str, value: Any) -> None:
    """Raises ConfigError if `value` is not a number; NaN and the infinities are allowed."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise ConfigError(f"faults.{name}={value} is not a number: use nan, inf, -inf, or a number such as 1000.0")


def random_below(seed: int, number: int, below: int) -> int:
    """Returns a random integer in [0, below), a function of seed and number."""
    return random.Random(f"{seed}/{number}").randrange(below)


def local_shard(tensor: Any) -> Tensor:
    """Returns this rank's shard of a sharded tensor, as a view; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def random_index(tensor: Tensor, seed: int, number: int) -> tuple[int, ...]:
    """Returns the index of a random element of `tensor`, a function of seed and number."""
    element, index = random_below(seed, number, tensor.numel()), []
    for size in reversed(tensor.shape):
        element, here = divmod(element, size)
        index.append(here)
    return tuple(reversed(index))


def number_for(value: float, dtype: torch.dtype) -> float | int:
    """Converts `value` for a tensor of `dtype`; in integers, NaN and Inf become 2^31 - 1 or the largest that fits."""
    if dtype.is_floating_point or dtype.is_complex:
        return value
    return int(value) if math.isfinite(value) else min(2**31 - 1, torch.iinfo(dtype).max)


def say(what: str) -> None:
    """Prints one line to stderr when a fault happens."""
    printable.say(f"stabletrain: fault injected: {what}", file=sys.stderr)
