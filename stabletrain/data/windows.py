"""Windows: cuts a token stream into samples of `block_size`, differently in each training epoch.

Sample i of an epoch reads `block_size + 1` tokens from `phase + i * block_size`. Its targets are its inputs shifted by
one, so an epoch predicts each token of its windows once. A random phase in [0, block_size) for each epoch moves the
window boundaries; validation has phase 0. A length warmup truncates training samples, but does not change which samples
a step reads.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from stabletrain.data.order import Sources, key, pass_ids, sample_ids
from stabletrain.errors import ConfigError
from stabletrain.records import IGNORE_INDEX, Batch


@runtime_checkable
class Stream(Protocol):
    """A sequence of tokens."""

    def __len__(self) -> int:
        """Number of tokens."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens `start ... stop - 1`, an integer array."""
        ...

    def locate(self, position: int) -> str:
        """Returns `<file> at byte <offset>` of a token."""
        ...


@dataclass(frozen=True)
class LengthWarmup:
    """Sequence-length warmup: begins with short sequences, whose gradients vary less (Li et al., arXiv 2108.06084).

    Attributes:
        steps: data positions over which the length grows linearly; 0 disables the warmup.
        start: length at data position 0, in tokens.
    """

    steps: int = 0
    start: int = 8

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"data.length_warmup={self.steps} is below 0: use 0 for full sequences from the start")
        if self.start < 1:
            raise ConfigError(f"data.length_start={self.start} is below 1: the paper starts with 8 tokens")
        if not self.steps and self.start != LengthWarmup.start:
            raise ConfigError(
                f"data.length_start={self.start} has no effect with data.length_warmup=0: set data.length_warmup to "
                "the number of steps over which samples grow"
            )

    def length(self, position: int, block_size: int) -> int:
        """Returns the length of a training sample: from `start` to `block_size`, in multiples of 8 tokens."""
        if position >= self.steps or self.start >= block_size:
            return block_size
        length = self.start + (block_size - self.start) * position // self.steps
        # Tensor cores need multiples of 8 for full speed.
        return max(self.start, length - length % 8)


class Windows:
    """Batches of windows over a training stream and a validation stream, looked up by number.

    Args:
        train: tokens to train on.
        val: tokens to validate on.
        block_size: tokens in a sample.
        seed: seed of the sample order and the phases.
        where: the user's key and its value, for errors.
        unit: name of a token in errors, such as `bytes`.
        length_warmup: sequence-length warmup of training samples.

    Raises:
        ConfigError: the block size is below 1, a stream is too short, or the warmup starts at the block size or above.
    """

    def __init__(
        self,
        train: Stream,
        val: Stream,
        *,
        block_size: int,
        seed: int,
        where: str,
        unit: str,
        length_warmup: LengthWarmup,
    ) -> None:
        if block_size < 1:
            raise ConfigError(
                f"data.block_size={block_size} is below 1: it is the number of tokens in a sample, for example 256"
            )
        if len(train) < block_size + 1:
            raise ConfigError(
                f"{where} has {len(train):,} {unit} for training, a sample needs data.block_size + 1 = "
                f"{block_size + 1:,}: give more text or lower data.block_size"
            )
        if len(val) < 2:
            raise ConfigError(
                f"{where} has {len(val)} {unit} for validation, at least 2 are needed: "
                "give more text or raise val_fraction"
            )
        if length_warmup.steps and length_warmup.start >= block_size:
            raise ConfigError(
                f"data.length_start={length_warmup.start} >= data.block_size={block_size}: the warmup of "
                "data.length_warmup would have no effect; lower data.length_start"
            )
        self.block_size, self.seed, self.length_warmup = block_size, seed, length_warmup
        self._train, self._val = train, val
        # One window fewer than fits at phase 0, so that every phase has the same number of windows.
        self._train_windows = max(1, (len(train) - block_size) // block_size)
        self._phases = min(block_size, len(train) - self._train_windows * block_size)
        self._val_windows = -(-(len(val) - 1) // block_size)

    def batches(self, size: int, split: str) -> int:
        """Returns the number of batches of `size` in one pass; the last validation batch may be smaller."""
        return -(-{"train": self._train_windows, "val": self._val_windows}[split] // size)

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Returns batch number `step`, a pure function of the arguments.

        Args:
            step: data position; unbounded for training, below `batches(size, "val")` for validation.
            size: samples in the batch.
            split: `train` (windows move each epoch) or `val`.

        Returns:
            inputs and targets int64 `[size, block_size]`, shorter during the length warmup; ids are the positions of
            the samples' first tokens in their stream. The end of the validation stream is padded with inputs 0 and
            targets `IGNORE_INDEX`.

        Raises:
            IndexError: a validation pass has no such batch.
        """
        return replace(self.rows(step, size, split, slice(0, size)), counted=None)

    def rows(self, step: int, size: int, split: str, rows: slice) -> Batch:
        """Returns some samples of batch number `step`; reads no other samples. See `batch`.

        Args:
            rows: which samples, `slice(start, stop)`.
        """
        stream = {"train": self._train, "val": self._val}[split]
        if split == "train":
            index, epochs = sample_ids(step * size, size, self._train_windows, self.seed)
            # A batch may cross an epoch, and each epoch has its own phase.
            phases = {epoch: key(self.seed, epoch, "phase") % self._phases for epoch in set(epochs.tolist())}
            every = index * self.block_size + np.array([phases[epoch] for epoch in epochs.tolist()])
            length = self.length_warmup.length(step, self.block_size)
        else:
            every = pass_ids(step, size, self._val_windows) * self.block_size
            length = self.block_size
        # The targets of the whole batch are counted from the samples' lengths, without reading them.
        targets_in_batch = int(np.minimum(length, len(stream) - 1 - every).sum())
        starts = every[rows]
        inputs = np.zeros((len(starts), length), np.int64)
        targets = np.full((len(starts), length), IGNORE_INDEX, np.int64)
        for row, start in enumerate(starts.tolist()):
            tokens = stream.read(start, min(start + length + 1, len(stream)))
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(tokens) - 1] = tokens[1:]
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            torch.from_numpy(starts),
            Sources(stream.locate, starts),
            targets_in_batch,
        )
