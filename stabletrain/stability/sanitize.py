"""Sanitizer: finds bad inputs and targets on the device, before they can crash a kernel or reach the weights.

A token id or label out of range raises inside a CPU kernel. On CUDA it triggers a device assert, after which the
process cannot continue. A NaN pixel reaches every weight. The sanitizer therefore checks each batch when it enters the
step, with elementwise operations and without a host read. It replaces ids out of range by valid ones so that the
forward pass runs, and returns a flag that closes the guard's gate, so the model never learns from replaced values.

Most batches come from the host, where a background thread reads their smallest and largest values (`Batch.examined`).
If these are in order, nothing is left to check on the device.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from stabletrain.records import IGNORE_INDEX, Batch, Number, Range

LARGEST_FLOAT = torch.finfo(torch.float32).max
"""Bound of targets that have no other: below it a number is finite."""


@dataclass(frozen=True)
class Sanitizer:
    """Checks inputs and targets.

    Attributes:
        vocab_size: token ids must be in [0, vocab_size); None if unknown, then integer inputs are not checked.
    """

    vocab_size: int | None = None

    def inputs(self, inputs: Tensor, known: Range | None = None) -> tuple[Tensor, Number, Bool[Tensor, ""] | bool]:
        """Checks inputs for NaN, Inf and ids out of range.

        Args:
            known: range of the inputs; None if unknown.

        Returns:
            Inputs that are safe to compute with, their largest magnitude (0 for ids), and whether a value was bad.
            Non-finite values are kept, because the step is skipped anyway.
        """
        if known is not None and known.bounds(inputs):
            if inputs.is_floating_point():
                if (magnitude := max(known.high, -known.low)) < math.inf:  # False for NaN
                    return inputs, magnitude, False
            elif self.vocab_size is None or 0 <= known.low <= known.high < self.vocab_size:
                return inputs, 0.0, False
        if inputs.is_floating_point():
            smallest, largest = inputs.aminmax()  # NaN if any value is
            largest = torch.maximum(largest, -smallest).float()
            return inputs, largest, ~(largest < math.inf)
        if self.vocab_size is None or inputs.is_complex() or inputs.dtype == torch.bool:
            return inputs, 0.0, False
        largest_id = min(self.vocab_size - 1, torch.iinfo(inputs.dtype).max)
        # Always clamp, and compare afterwards: a branch on the result would wait for the device.
        safe = inputs.clamp(0, largest_id)
        return safe, 0.0, (safe != inputs).any()

    def targets(
        self,
        targets: Integer[Tensor, "*shape"] | Float[Tensor, "*shape"],
        classes: int | None,
        known: Range | None = None,
    ) -> tuple[Integer[Tensor, "*shape"] | Float[Tensor, "*shape"], Bool[Tensor, ""] | bool]:
        """Returns targets with ids out of range replaced by `IGNORE_INDEX`, and whether there were any.

        Args:
            targets: class ids; or floats, which are kept, and are bad if they are not finite or outside of
                [0, classes - 1].
            classes: number of classes; None if targets have no bounds.
            known: range of the targets that are not `IGNORE_INDEX`; None if unknown.
        """
        floats = targets.is_floating_point()
        if known is not None and known.bounds(targets):
            low, high = (-LARGEST_FLOAT, LARGEST_FLOAT) if classes is None else (0, classes - 1)
            if low <= known.low and known.high <= high:  # False for NaN
                return targets if floats else targets.long(), False
        if floats:
            smallest, largest = targets.aminmax()  # NaN if any value is
            low, high = (-LARGEST_FLOAT, LARGEST_FLOAT) if classes is None else (0, classes - 1)
            return targets, ~((smallest >= low) & (largest <= high))
        if classes is None:
            return targets, torch.zeros((), dtype=torch.bool, device=targets.device)
        targets = targets.long()  # uint8 cannot hold -100, and the loss kernels expect int64
        safe = targets.masked_fill(targets.clamp(0, classes - 1) != targets, IGNORE_INDEX)
        return safe, (safe != targets).any()

    def safe(self, batch: Batch, classes: int | None) -> Batch:
        """Returns the batch with every id in range, for code that runs the model outside of a step."""
        return replace(batch, inputs=self.inputs(batch.inputs)[0], targets=self.targets(batch.targets, classes)[0])
