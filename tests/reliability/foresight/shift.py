"""The standard library's text, of which more and more samples change to bytes that the model has never seen."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stabletrain.data.text import Stdlib
from stabletrain.records import Batch


class ShiftedText(Stdlib):
    """Stdlib, with 128 added to every byte (modulo 256) of some samples from batch `start` on.

    Args:
        start: first batch with changed samples.
        length: batches until all samples are changed; their share grows linearly.
        **kwargs: as for `Stdlib`.
    """

    def __init__(self, start: int, length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start, self.length = start, length

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Returns `Stdlib`'s batch with the share of changed samples; validation batches are unchanged."""
        batch = super().batch(step, size, split)
        share = min(1.0, max(0.0, (step - self.start + 1) / self.length))
        if split != "train" or not share:
            return batch
        drawn = np.random.default_rng([step, 17]).random(size)
        changed = torch.from_numpy(drawn < share)[:, None]
        inputs, targets = batch.inputs, batch.targets
        known = changed & (targets >= 0)
        return replace(
            batch,
            inputs=torch.where(changed, (inputs + 128) % 256, inputs),
            targets=torch.where(known, (targets + 128) % 256, targets),
        )
