"""Digits whose labels are vectors of floats, for the objectives that compare numbers."""

from dataclasses import replace

import torch

from stabletrain.data.images import Digits
from stabletrain.records import Batch


class OneHotDigits(Digits):
    """Digits with float targets `[batch, classes]`: 1 for the class, 0 for the others."""

    def batch(self, step: int, size: int, split: str) -> Batch:
        return self._one_hot(super().batch(step, size, split))

    def rows(self, step: int, size: int, split: str, rows: slice) -> Batch:
        return self._one_hot(super().rows(step, size, split, rows))

    def _one_hot(self, batch: Batch) -> Batch:
        if batch.targets.is_floating_point():  # `batch` may call `rows`
            return batch
        return replace(batch, targets=torch.nn.functional.one_hot(batch.targets, self.num_classes).float())
