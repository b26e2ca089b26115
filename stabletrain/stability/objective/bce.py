"""Binary cross-entropy of logits: two classes, or several labels that may hold at once.

    total = -sum_i (y_i log sigmoid(x_i) + (1 - y_i) log(1 - sigmoid(x_i))) / n_valid

Computed from the logits in one formula, which is finite for every finite logit (`log(sigmoid(x))` is not).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stabletrain.records import IGNORE_INDEX, Batch, LossTerms
from stabletrain.stability.objective.base import Count, Objective, fitted, mean


@dataclass(frozen=True)
class BCE(Objective):
    """Binary cross-entropy, in nats; outputs are logits in the shape of the targets.

    Targets are probabilities in [0, 1], or integers 0 and 1, of which `IGNORE_INDEX` is not counted.
    """

    unit: ClassVar[str] = "nats"

    def classes(self, outputs: Any) -> int | None:
        """Returns 2: targets are in [0, 1]."""
        return 2

    def check(self, outputs: Any, targets: Tensor) -> None:
        """Refuses outputs of another shape than the targets."""
        fitted(outputs, targets, "objective=bce")

    def __call__(self, outputs: Float[Tensor, "batch ..."], batch: Batch, n_valid: Count) -> LossTerms:
        """Returns this micro-batch's share of the mean over all valid targets; see `Objective`."""
        return LossTerms(self.each(outputs, batch.targets).sum() / n_valid)

    def each(self, outputs: Float[Tensor, "batch ..."], targets: Tensor) -> Tensor:
        """Returns the loss of each target in fp32, 0 where it is ignored."""
        logits, ignored = fitted(outputs, targets, "objective=bce"), targets == IGNORE_INDEX
        wanted = targets.masked_fill(ignored, 0).float()
        return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").masked_fill(ignored, 0.0)

    def sums(self, outputs: Float[Tensor, "batch ..."], batch: Batch) -> dict[str, Tensor]:
        """Sums the loss and the correct predictions over a validation batch."""
        valid = batch.targets != IGNORE_INDEX
        logits = fitted(outputs, batch.targets, "objective=bce")
        return {
            "loss": self.each(outputs, batch.targets).double().sum(),
            "count": valid.sum().double(),
            "correct": (((logits > 0) == (batch.targets > 0.5)) & valid).sum().double(),
        }

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the mean `loss` in nats, and `accuracy`: the share of targets on the right side of 0.5."""
        return {
            "loss": mean(sums["loss"], sums["count"]),
            "accuracy": mean(sums["correct"], sums["count"]),
        }
