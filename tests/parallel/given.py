"""Data and models for the tests of several ranks, given as a user's plug-ins are: by `_target_`."""

import os
import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from stabletrain.data.text import Stdlib
from stabletrain.models.gpt import GPT
from stabletrain.records import IGNORE_INDEX, Batch


class Uneven(Stdlib):
    """Text of which the first samples of a batch have few targets that count, and the last have all."""

    def batch(self, step: int, size: int, split: str) -> Batch:
        batch = super().batch(step, size, split)
        targets = batch.targets.clone()
        for row in range(size // 2):
            targets[row, 1 + row :] = IGNORE_INDEX
        return replace(batch, targets=targets)


class OneSided(Stdlib):
    """Text of which no target in the first half of a batch counts: of two ranks the first has nothing to learn from."""

    def batch(self, step: int, size: int, split: str) -> Batch:
        batch = super().batch(step, size, split)
        targets = batch.targets.clone()
        targets[: size // 2] = IGNORE_INDEX
        return replace(batch, targets=targets)


class Unused(nn.Module):
    """A linear classifier of 8 x 8 pixels with a weight that its forward pass leaves out."""

    def __init__(self, num_classes: int, in_channels: int, **_: object) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels * 64, num_classes)
        self.spare = nn.Linear(num_classes, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(torch.flatten(inputs, 1))


class LateInFirstStep(GPT):
    """A GPT whose forward pass in the first step takes eight seconds longer on rank 1."""

    late, passes = 1, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes += torch.is_grad_enabled()
        if self.passes == self.late and os.environ["RANK"] == "1":
            time.sleep(8)
        return super().forward(tokens)


class LateInThirdStep(LateInFirstStep):
    """The same in the third step."""

    late = 3


class FailsOnRankOne(GPT):
    """A GPT that raises in the third forward pass of rank 1."""

    passes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 3 and os.environ["RANK"] == "1":
            raise ValueError("the third sequence is too sad")
        return super().forward(tokens)


def absolute_error(outputs: Tensor, batch: Batch, n_valid: Tensor) -> Tensor:
    """A loss of the user's own that returns a scalar: the mean over its micro-batch."""
    del n_valid
    return (outputs.flatten() - batch.targets.flatten()).abs().mean()
