"""What every objective can do, and the defaults of most."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, SupportsFloat

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.records import Batch, LossTerms
from stabletrain.stability.step_tools import StepTools

Count = Int[Tensor, ""] | Float[Tensor, ""]
"""A number of targets, on the device."""


class Objective:
    """A loss: what a step minimises, and what an evaluation reports.

    Attributes:
        unit: unit of the loss, such as `nats`; empty if it has none.
        takes_tensor: whether it takes a tensor. If the model returns an object or a tuple, the objective then gets its
            logits (`trainer/contract.py`).
        softmax: whether the outputs are logits of a softmax, of which `log Z` can be measured.
        couples_samples: whether the loss of one sample depends on the others of its micro-batch, as in contrastive
            learning. Micro-batches and ranks would then change what is learnt, so they are refused.
    """

    unit: ClassVar[str] = ""
    takes_tensor: ClassVar[bool] = True
    softmax: ClassVar[bool] = False
    couples_samples = False

    @property
    def plain(self) -> "Objective":
        """Returns itself; the attribute of `ChunkedLoss` with this name is the objective it wraps."""
        return self

    def wrap(self, forward: Callable[..., Any], model: nn.Module, tools: StepTools) -> Callable[..., Any]:
        """Returns `forward` unchanged, because most losses need the full outputs."""
        return forward

    def with_model(self, outputs: Any, model: nn.Module) -> Any:
        """Returns the outputs as the loss takes them: with the model that computed them, if it needs its weights."""
        return outputs

    def classes(self, outputs: Any) -> int | None:
        """Returns the number of classes, so that targets are in [0, classes); None if targets are no class ids."""
        return None

    def check_targets(self, targets: Tensor) -> None:
        """Raises ConfigError if the objective cannot take targets of this dtype."""

    def check(self, outputs: Any, targets: Tensor) -> None:
        """Raises ConfigError if the model's outputs do not fit the targets."""

    def own_factor(self, batch: Batch) -> float:
        """Returns the factor from a rank's share of the step's loss to the mean over its own part of the batch."""
        return (batch.counted or 0) / max(batch.count_targets(), 1)

    def __call__(self, outputs: Any, batch: Batch, n_valid: Tensor) -> LossTerms:
        """Returns this micro-batch's share of the step's loss, in fp32, with its graph.

        Args:
            outputs: what the model returned.
            batch: the micro-batch, on the model's device; ids out of range are replaced.
            n_valid: number of valid targets of the whole step, over all ranks and micro-batches, at least 1; 0-d.
        """
        raise NotImplementedError

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Returns sums over a validation batch: fp64 tensors, which are added up over all batches and ranks."""
        raise NotImplementedError

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the metrics of an evaluation from its sums: `loss`, and others by name. NaN if nothing counted."""
        raise NotImplementedError


def mean(total: SupportsFloat, count: SupportsFloat) -> float:
    """Returns `total / count`; NaN if the count is 0."""
    return float(total) / float(count) if float(count) else float("nan")


def form(outputs: Any) -> str:
    """Describes what a model returned: the shape of a tensor, else the type."""
    return str(list(outputs.shape)) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"


def fitted(outputs: Any, targets: Tensor, what: str) -> Tensor:
    """Returns the outputs in the shape of the targets and in fp32; a last dimension of size 1 is removed.

    Raises:
        ConfigError: the outputs are no tensor, or have another shape.
    """
    if isinstance(outputs, Tensor) and outputs.shape in (targets.shape, (*targets.shape, 1)):
        return outputs.float().view(targets.shape)
    raise ConfigError(
        f"model: forward() gave {form(outputs)} for targets of {list(targets.shape)}: {what} compares them one by one, "
        "so return a tensor of the targets' shape"
    )
