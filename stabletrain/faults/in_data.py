"""Bad data: what a broken file, a wrong label or an empty shard hands to a training run.

Faults of the data happen by data position, the `step` that `batch` is asked for: bad data stays where it is, however
often it is read, and only a rollback, which passes positions over, gets past it. Validation stays as it is.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.faults.planned import OnRank, check_at_least, check_number, drawn, place, say, writable
from stabletrain.records import IGNORE_INDEX, Batch


class CorruptedData:
    """A data set of which some training batches are spoilt; all else it is asked for is the data's own.

    Args:
        data: the data set; it is never written to.
        fault: what spoils it.
    """

    def __init__(self, data: Any, fault: "DataFault") -> None:
        self._data, self._fault = data, fault

    def __getattr__(self, name: str) -> Any:
        if name in ("_data", "_fault"):  # not there yet, while this object is being copied
            raise AttributeError(name)
        return getattr(self._data, name)

    def batch(self, step: int, size: int, split: str) -> Any:
        """The data's batch, spoilt if it is one of training at a planned position."""
        batch = self._data.batch(step, size, split)
        if split != "train" or not self._fault.hits(step) or not isinstance(batch, Batch):
            return batch
        say(f"{type(self._fault).__name__.lower()} at data position {step}")
        return self._fault.corrupt(batch, step, self._data)


@dataclass(frozen=True)
class DataFault(OnRank):
    """A fault of the training data; `at` counts data positions."""

    def data(self, data: Any) -> Any:
        """The data with its planned batches spoilt."""
        return CorruptedData(data, self)

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        """The spoilt batch; must copy what it changes."""
        raise NotImplementedError


@dataclass(frozen=True)
class Input(DataFault):
    """One bad element in the inputs of one sample.

    Attributes:
        value: what is written: NaN, Inf or any other number. Token ids cannot be NaN or Inf: for them it is an id far
            out of range, 2^31 - 1, as a corrupt file would hold.
        seed: which element.
    """

    value: float = float("nan")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("value", self.value)

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        return replace(batch, inputs=written(batch.inputs, self.value, self.seed, position))


@dataclass(frozen=True)
class Label(DataFault):
    """One target that is no class.

    Attributes:
        value: what is written. A class, from 0 to their number less 1, makes a wrong label of it.
        seed: which target.
    """

    value: int = 10**6
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value == IGNORE_INDEX:
            raise ConfigError(
                f"faults.value={IGNORE_INDEX} is a target that is not counted: use faults=ignored, or faults.value=-1"
            )

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        return replace(batch, targets=written(batch.targets, self.value, self.seed, position))


@dataclass(frozen=True)
class Ignored(DataFault):
    """A batch of which no target counts, as of padding alone."""

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        return replace(batch, targets=torch.full_like(batch.targets, IGNORE_INDEX))


@dataclass(frozen=True)
class Empty(DataFault):
    """A batch without samples."""

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        ids = None if batch.ids is None else batch.ids[:0]
        sources = None if batch.sources is None else batch.sources[:0]
        return Batch(batch.inputs[:0], batch.targets[:0], ids, sources)


@dataclass(frozen=True)
class Poison(DataFault):
    """Batches that are finite and of valid labels, and wrong: every target another class, images too bright.

    Attributes:
        factor: inputs that are no whole numbers are multiplied by it.
        length: consecutive positions from each of `at` on.
        seed: which wrong classes.
    """

    factor: float = 100.0
    length: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor)
        check_at_least("length", self.length, 1)

    def hits(self, number: int) -> bool:
        return self.on_this_rank() and any(start <= number < start + self.length for start in self.at)

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        classes = count_classes(data, batch.targets)
        generator = torch.Generator().manual_seed(drawn(self.seed, position, 2**32))
        away = torch.randint(1, max(classes, 2), batch.targets.shape, generator=generator).to(batch.targets.device)
        wrong = torch.where(batch.targets == IGNORE_INDEX, IGNORE_INDEX, (batch.targets + away) % classes)
        inputs = batch.inputs * self.factor if batch.inputs.is_floating_point() else batch.inputs
        return replace(batch, inputs=inputs, targets=wrong)


def count_classes(data: Any, targets: Tensor) -> int:
    """How many classes there are: what the data says, else what this batch shows."""
    for name in ("num_classes", "vocab_size"):
        if isinstance(count := getattr(data, name, None), int):
            return count
    return int(targets.max()) + 1 if targets.numel() else 1


def written(tensor: Tensor, value: float, seed: int, position: int) -> Tensor:
    """A copy with one element overwritten; of an empty tensor, itself."""
    if not tensor.numel():
        return tensor
    copy = tensor.clone()
    copy[place(tensor, seed, position)] = writable(value, tensor.dtype)
    return copy
