"""Intake: what no model can learn from is found on the device, before it can crash a kernel or poison a statistic.

A token id or a label out of range raises from inside a CPU kernel, and on CUDA it trips a device assert, after which
the whole process is lost. A pixel that is NaN reaches every weight. So a batch is looked at as it enters the step, in a
few elementwise operations and without a host read: values out of range are replaced by harmless ones, so that the
forward pass runs, and the flag that is returned closes the guard's gate. Nothing is ever learnt from a replaced value.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stabletrain.records import IGNORE_INDEX, Batch


@dataclass(frozen=True)
class Sanitizer:
    """Looks at inputs and targets.

    Attributes:
        vocab_size: token ids lie in [0, vocab_size); None where nobody knows, and whole-number inputs go unchecked.
    """

    vocab_size: int | None = None

    def inputs(self, inputs: Tensor) -> tuple[Tensor, Float[Tensor, ""], Bool[Tensor, ""]]:
        """Inputs that are safe to compute with, their largest magnitude, and whether they held something bad.

        That is NaN, Inf or an id out of range. Values that are not finite stay as they are: they harm nothing but the
        numbers of a step that is withheld. Ids have no magnitude: 0.
        """
        if inputs.is_floating_point():
            largest = torch.stack(inputs.aminmax()).abs().amax().float()
            return inputs, largest, ~torch.isfinite(largest)
        none = torch.zeros((), device=inputs.device)
        if self.vocab_size is None or inputs.is_complex() or inputs.dtype == torch.bool:
            return inputs, none, none.bool()
        known = in_range(inputs, self.vocab_size)
        return torch.where(known, inputs, 0), none, ~known.all()

    def targets(self, targets: Int[Tensor, "*shape"], classes: int) -> tuple[Int[Tensor, "*shape"], Bool[Tensor, ""]]:
        """Targets of which each is a class or `IGNORE_INDEX`, and whether one was neither.

        Args:
            targets: class ids.
            classes: how many there are, the last dimension of the logits.
        """
        targets = targets.long()  # -100 has no place in uint8, and kernels know int64
        known = in_range(targets, classes) | (targets == IGNORE_INDEX)
        return torch.where(known, targets, IGNORE_INDEX), ~known.all()

    def safe(self, batch: Batch, classes: int) -> Batch:
        """The batch with every value in range, for whoever looks at a step beside it."""
        return replace(batch, inputs=self.inputs(batch.inputs)[0], targets=self.targets(batch.targets, classes)[0])


def in_range(ids: Int[Tensor, "*shape"], count: int) -> Bool[Tensor, "*shape"]:
    """Which of `ids` lie in [0, count)."""
    return (ids >= 0) & (ids < count)
