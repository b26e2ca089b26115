"""What is minimised: cross-entropy in fp32, plus a z-loss that is reported apart.

    total = ce + zloss
    ce    = -sum_i log softmax(logits_i)[target_i] / n_valid
    zloss = coefficient * sum_i (log Z_i)^2 / n_valid,      log Z_i = logsumexp(logits_i)

Sums run over the targets that are not `IGNORE_INDEX`, and `n_valid` counts them over the *whole step*, so that
micro-batches with unequal numbers of valid targets add up to the exact mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.protocols import Tools
from stabletrain.records import IGNORE_INDEX, LossTerms


def z_loss(logits: Float[Tensor, "n classes"], coefficient: float) -> Float[Tensor, " n"]:
    """`coefficient * (log Z)^2` of each row: keeps softmax's free offset near 0, where bf16 has its precision.

    Computed in fp32 whatever the dtype of `logits` (fp64 stays fp64).
    Source: PaLM, arXiv 2204.02311, section 5 (coefficient 1e-4).
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return coefficient * torch.logsumexp(wide, dim=-1).square()


@runtime_checkable
class ZLossKind(Protocol):
    """A kind of z-loss: fp32 logits and which rows count in, one 0-d sum out."""

    def __call__(self, logits: Tensor, valid: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class NoZLoss:
    """No z-loss: the zero of the sum."""

    def __call__(self, logits: Float[Tensor, "n classes"], valid: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
        """0, without a gradient."""
        del valid
        return logits.new_zeros(())


@dataclass(frozen=True)
class ZLoss:
    """`z_loss` summed over the valid targets (PaLM, arXiv 2204.02311)."""

    coefficient: float

    def __post_init__(self) -> None:
        if not 0 < self.coefficient < float("inf"):
            raise ConfigError(
                f"zloss.coefficient={self.coefficient} is not a finite number above 0: 1e-4 is customary; use "
                "zloss=none for no z-loss"
            )

    def __call__(self, logits: Float[Tensor, "n classes"], valid: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
        """The sum, with its gradient to the logits of valid rows only."""
        return z_loss(logits, self.coefficient).masked_fill(~valid, 0.0).sum()


def count_valid(targets: Int[Tensor, "*shape"]) -> Int[Tensor, ""]:
    """How many targets count, on their device: no host read."""
    return (targets != IGNORE_INDEX).sum()


@dataclass(frozen=True)
class Objective:
    """Cross-entropy with label smoothing and a kind of z-loss.

    Attributes:
        zloss: `NoZLoss` or `ZLoss`.
        label_smoothing: share of the target's mass spread over all classes, in [0, 1) (arXiv 1512.00567).
    """

    zloss: ZLossKind
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} is outside [0, 1): 0.1 is customary")

    @property
    def plain(self) -> "Objective":
        """The same, of whole logits: itself."""
        return self

    def wrap(self, forward: Callable[..., Tensor], model: nn.Module, tools: Tools) -> Callable[..., Tensor]:
        """`forward` itself: the loss reads the model's whole logits."""
        del model, tools
        return forward

    def __call__(
        self,
        logits: Float[Tensor, "batch *time classes"],
        targets: Int[Tensor, "batch *time"],
        n_valid: Int[Tensor, ""] | Float[Tensor, ""],
    ) -> LossTerms:
        """The terms of this micro-batch's share of the step's mean loss, in fp32, with their graph.

        Args:
            logits: any floating dtype; read as fp32.
            targets: class ids; `IGNORE_INDEX` is not counted.
            n_valid: valid targets of the whole step, at least 1.
        """
        if not isinstance(logits, Tensor) or logits.ndim != targets.ndim + 1:
            shape = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ConfigError(
                f"model: forward() gave {shape} for targets of {list(targets.shape)}: logits are [batch, classes], "
                "or [batch, time, vocab] for text"
            )
        rows = logits.flatten(0, -2).float()
        wanted = targets.flatten()
        ce = F.cross_entropy(
            rows, wanted, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=self.label_smoothing
        )
        ce = ce / n_valid
        zloss = self.zloss(rows, wanted != IGNORE_INDEX) / n_valid
        return LossTerms(total=ce + zloss, ce=ce, zloss=zloss)
