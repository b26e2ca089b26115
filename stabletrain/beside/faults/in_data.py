"""Bad training data, as caused by a corrupt file, a wrong label or an empty shard.

These faults happen at data positions, the `step` argument of `batch`. Reading a position again gives the same bad
batch; only a rollback that skips the position avoids it. Validation data is not changed.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stabletrain.beside.faults.planned import BadNumber, Multiplied, OnRank, number_for, random_below, random_index, say
from stabletrain.errors import ConfigError
from stabletrain.records import IGNORE_INDEX, Batch, reads_rows


class CorruptedData:
    """A data set with corrupted training batches; forwards all other attributes to the original data set.

    Args:
        data: the original data set, which is not modified.
        fault: corrupts the planned batches.
    """

    def __init__(self, data: Any, fault: "DataFault") -> None:
        self._data, self._fault = data, fault

    def __getattr__(self, name: str) -> Any:
        if name in ("_data", "_fault"):  # not set yet while this object is being copied: avoids infinite recursion
            raise AttributeError(name)
        return getattr(self._data, name)

    def batch(self, step: int, size: int, split: str) -> Any:
        """Returns the data's batch, corrupted if it is a training batch at a planned position."""
        batch = self._data.batch(step, size, split)
        if split != "train" or not self._fault.happens_here(step) or not isinstance(batch, Batch):
            return batch
        say(f"{type(self._fault).__name__.lower()} at data position {step}")
        return self._fault.corrupt(batch.transformed(), step, self._data)


class CorruptedRows(CorruptedData):
    """The same for a data set with a method `rows`."""

    def rows(self, step: int, size: int, split: str, rows: slice) -> Any:
        """Returns the data's rows. A corrupted batch is read whole, because a fault is drawn over the whole batch."""
        if split != "train" or not self._fault.happens_here(step):
            return self._data.rows(step, size, split, rows)
        whole = self.batch(step, size, split)
        return whole.shard(rows) if isinstance(whole, Batch) else whole


@dataclass(frozen=True)
class DataFault(OnRank):
    """A fault of the training data; `at` counts data positions."""

    def data(self, data: Any) -> Any:
        """Returns the data with its planned batches corrupted."""
        return CorruptedRows(data, self) if reads_rows(data) else CorruptedData(data, self)

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        """Returns the corrupted batch; must copy the tensors it changes."""
        raise NotImplementedError


@dataclass(frozen=True)
class Input(BadNumber, DataFault):
    """One bad element in the inputs of one sample.

    Attributes:
        value: new value: NaN, Inf or any other number. Token ids cannot be NaN or Inf: they become 2^31 - 1, an id far
            out of range.
        seed: selects the element.
    """

    seed: int = 0

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        return replace(batch, inputs=written(batch.inputs, self.value, self.seed, position))


@dataclass(frozen=True)
class Label(DataFault):
    """One target out of range, or a wrong label; among targets that are floats, a NaN.

    Attributes:
        value: new target; a value between 0 and the number of classes minus 1 is a valid but wrong label.
        seed: selects the target.
    """

    value: int = 10**6
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value == IGNORE_INDEX:
            raise ConfigError(
                f"faults.value={IGNORE_INDEX} is a target that the loss ignores: use faults=ignored, or faults.value=-1"
            )

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        value = math.nan if batch.targets.is_floating_point() else self.value  # floats have no range
        return replace(batch, targets=written(batch.targets, value, self.seed, position))


@dataclass(frozen=True)
class Ignored(DataFault):
    """A batch whose targets are all ignored, such as a batch of padding."""

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        if batch.targets.is_floating_point():
            raise ConfigError("faults=ignored: targets are floats, and all of them count: use faults=label or empty")
        return replace(batch, targets=torch.full_like(batch.targets, IGNORE_INDEX))


@dataclass(frozen=True)
class Empty(DataFault):
    """A batch without samples."""

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        ids = None if batch.ids is None else batch.ids[:0]
        sources = None if batch.sources is None else batch.sources[:0]
        return Batch(batch.inputs[:0], batch.targets[:0], ids, sources)


@dataclass(frozen=True)
class Poison(Multiplied, DataFault):
    """Batches with finite inputs and valid but wrong targets; images are too bright.

    Every target is another class, or, among targets that are floats, that of another sample.

    Attributes:
        factor: multiplies floating-point inputs; token ids are not changed.
        length: number of consecutive bad positions, beginning at each of `at`.
        seed: selects the wrong classes.
    """

    seed: int = 0

    def corrupt(self, batch: Batch, position: int, data: Any) -> Batch:
        inputs = batch.inputs * self.factor if batch.inputs.is_floating_point() else batch.inputs
        if batch.targets.is_floating_point():
            return replace(batch, inputs=inputs, targets=batch.targets.roll(1, 0))
        classes = count_classes(data, batch.targets)
        generator = torch.Generator().manual_seed(random_below(self.seed, position, 2**32))
        away = torch.randint(1, max(classes, 2), batch.targets.shape, generator=generator).to(batch.targets.device)
        wrong = torch.where(batch.targets == IGNORE_INDEX, IGNORE_INDEX, (batch.targets + away) % classes)
        return replace(batch, inputs=inputs, targets=wrong)


def count_classes(data: Any, targets: Tensor) -> int:
    """Returns the number of classes: an attribute of the data, or else the largest target of this batch plus 1."""
    for name in ("num_classes", "vocab_size"):
        if isinstance(count := getattr(data, name, None), int):
            return count
    return int(targets.max()) + 1 if targets.numel() else 1


def written(tensor: Tensor, value: float, seed: int, position: int) -> Tensor:
    """Returns a copy with one element overwritten; an empty tensor is returned unchanged."""
    if not tensor.numel():
        return tensor
    copy = tensor.clone()
    copy[random_index(tensor, seed, position)] = number_for(value, tensor.dtype)
    return copy
