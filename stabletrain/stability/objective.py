"""The objective: cross-entropy in fp32, plus a z-loss that is logged separately; in chunks: `chunked_loss.py`.

    total = ce + zloss
    ce    = -sum_i log softmax(logits_i)[target_i] / n_valid
    zloss = coefficient * sum_i (log Z_i)^2 / n_valid,      log Z_i = logsumexp(logits_i)

Sums run over the targets that are not `IGNORE_INDEX`. `n_valid` counts these targets in the *whole step*, so
micro-batches with different numbers of valid targets add up to the exact mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.protocols import Tools
from stabletrain.records import IGNORE_INDEX, LossTerms


def z_loss(logits: Float[Tensor, "n classes"], coefficient: float) -> Float[Tensor, " n"]:
    """Returns `coefficient * (log Z)^2` of each row, in fp32 (fp64 stays fp64).

    Softmax ignores an offset common to all logits. This loss keeps the offset near 0, where bf16 is most precise.
    Source: PaLM, arXiv 2204.02311, section 5 (coefficient 1e-4).
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return coefficient * torch.logsumexp(wide, dim=-1).square()


@runtime_checkable
class ZLossKind(Protocol):
    """A kind of z-loss: adds it to the cross-entropy, computed from fp32 logits and their targets."""

    def add(self, ce: Tensor, logits: Tensor, targets: Tensor, n_valid: Tensor) -> LossTerms: ...


@dataclass(frozen=True)
class NoZLoss:
    """No z-loss."""

    def add(
        self,
        ce: Float[Tensor, ""],
        logits: Float[Tensor, "n classes"],
        targets: Int[Tensor, " n"],
        n_valid: Int[Tensor, ""] | Float[Tensor, ""],
    ) -> LossTerms:
        """Returns the cross-entropy alone."""
        del logits, targets, n_valid
        return LossTerms(total=ce, ce=ce)


@dataclass(frozen=True)
class ZLoss:
    """`z_loss`, averaged over the valid targets (PaLM, arXiv 2204.02311)."""

    coefficient: float

    def __post_init__(self) -> None:
        if not 0 < self.coefficient < float("inf"):
            raise ConfigError(
                f"zloss.coefficient={self.coefficient} is not a finite number above 0: 1e-4 is customary; use "
                "zloss=none for no z-loss"
            )

    def add(
        self,
        ce: Float[Tensor, ""],
        logits: Float[Tensor, "n classes"],
        targets: Int[Tensor, " n"],
        n_valid: Int[Tensor, ""] | Float[Tensor, ""],
    ) -> LossTerms:
        """Returns the sum of both; only rows with a valid target get a gradient of the z-loss."""
        zloss = z_loss(logits, self.coefficient).masked_fill(targets == IGNORE_INDEX, 0.0).sum() / n_valid
        return LossTerms(total=ce + zloss, ce=ce, zloss=zloss)


def check_logits(logits: Any, targets: Tensor) -> None:
    """Raises ConfigError if a model's output is not a tensor with one dimension more than `targets`."""
    if not isinstance(logits, Tensor) or logits.ndim != targets.ndim + 1:
        shape = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ConfigError(
            f"model: forward() gave {shape} for targets of {list(targets.shape)}: logits are [batch, classes], or "
            "[batch, time, vocab] for text; return them, an object with .logits, or a tuple that begins with them"
        )


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
        """Returns itself; the attribute of `ChunkedLoss` with this name is the objective it wraps."""
        return self

    def wrap(self, forward: Callable[..., Tensor], model: nn.Module, tools: Tools) -> Callable[..., Tensor]:
        """Returns `forward` unchanged, because this loss needs the full logits."""
        del model, tools
        return forward

    def __call__(
        self,
        logits: Float[Tensor, "batch *time classes"],
        targets: Int[Tensor, "batch *time"],
        n_valid: Int[Tensor, ""] | Float[Tensor, ""],
    ) -> LossTerms:
        """Returns this micro-batch's share of the step's mean loss, in fp32, with its graph.

        Args:
            logits: any floating dtype; upcast to fp32.
            targets: class ids; `IGNORE_INDEX` is not counted.
            n_valid: valid targets of the whole step, at least 1.

        Raises:
            ConfigError: `logits` is not a tensor with one dimension more than `targets`.
        """
        check_logits(logits, targets)
        rows = logits.flatten(0, -2).float()
        wanted = targets.flatten()
        ce = F.cross_entropy(
            rows, wanted, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=self.label_smoothing
        )
        return self.zloss.add(ce / n_valid, rows, wanted, n_valid)
