"""Mean squared error, for regression: the mean over all elements of the targets.

total = sum_i (output_i - target_i)^2 / n_valid
r2    = 1 - sum_i (output_i - target_i)^2 / sum_i (target_i - mean)^2       (in evaluations)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.records import Batch, LossTerms
from stabletrain.stability.objective.base import Count, Objective, fitted, mean


@dataclass(frozen=True)
class MSE(Objective):
    """Mean squared error of outputs that have the shape of their floating-point targets."""

    def check_targets(self, targets: Tensor) -> None:
        """Refuses targets that are no numbers."""
        if not targets.is_floating_point():
            raise ConfigError(
                f"data: targets are {targets.dtype}, and objective=mse takes numbers: return them as float32, or use "
                "objective=cross_entropy for class ids"
            )

    def check(self, outputs: Any, targets: Tensor) -> None:
        """Refuses outputs of another shape than the targets."""
        self.check_targets(targets)
        fitted(outputs, targets, "objective=mse")

    def __call__(self, outputs: Float[Tensor, "batch ..."], batch: Batch, n_valid: Count) -> LossTerms:
        """Returns this micro-batch's share of the mean over all elements; see `Objective`."""
        self.check_targets(batch.targets)
        wanted = batch.targets.float()
        return LossTerms(F.mse_loss(fitted(outputs, wanted, "objective=mse"), wanted, reduction="sum") / n_valid)

    def sums(self, outputs: Float[Tensor, "batch ..."], batch: Batch) -> dict[str, Tensor]:
        """Sums squares over a validation batch, for each output where the targets are `[batch, outputs]`."""
        self.check_targets(batch.targets)
        wanted = batch.targets.double()
        error = (fitted(outputs, batch.targets, "objective=mse").double() - wanted).square().sum()
        rows = wanted if wanted.ndim == 2 else wanted.flatten()[:, None]
        count = wanted.new_full((), wanted.numel())
        return {
            "error": error,
            "count": count,
            "rows": wanted.new_full((), len(rows)),
            "sum": rows.sum(dim=0),
            "square": rows.square().sum(dim=0),
        }

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the mean squared error `loss`, and `r2`, the share of the targets' variance that is explained.

        With several outputs, each has a mean of its own, and their variances are added up.
        """
        spread = (sums["square"] - sums["sum"] ** 2 / max(float(sums["rows"]), 1)).sum()
        unexplained = mean(sums["error"], spread) if spread > 0 else float("nan")
        return {"loss": mean(sums["error"], sums["count"]), "r2": 1 - unexplained}
