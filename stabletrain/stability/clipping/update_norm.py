"""Clipping of the update (update_norm): shortens an update whose norm is an outlier among recent updates.

    z = (|u| - mean) / (std + 1e-6)
    u <- u (mean + z_threshold^2 std / z) / |u|   if z > z_threshold,      then   w <- w - lr (u + decay w)

|u| is the L2 norm over all parameters of what the optimizer is about to subtract, divided by the learning rate and
without weight decay. Clipping gradients does not bound it: if the second moment is too small for this step's gradient,
Adam's update is too large although the gradient was clipped. The rule and its statistics are ZClip's (Kumar et al.,
arXiv 2504.02507, see `adaptive.py`), here on updates; that the update is what to clip is Adafactor's idea (Shazeer and
Stern, arXiv 1804.04235, section 5), which StableAdamW applies to each tensor, by its RMS. The combination is this
package's own.

The learning rate is left out, so that warmup and schedule are no outliers. The statistics use the norm after clipping,
of applied updates only. Weight decay is not scaled: it does not depend on gradients, so no spike enters it.

Only an optimizer that shows its update can be scaled (`optimizers/gated.py`); PyTorch's fused kernels write at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float32
from torch import Tensor, nn

from stabletrain.records import Clipped, GradNorms
from stabletrain.stability.clipping.adaptive import Outliers


class StepScale:
    """The factor of one step's update.

    Attributes:
        coef: the factor, 0-d fp32; 1 until the optimizer asks for it.
    """

    def __init__(self, clipping: Outliers, device: torch.device) -> None:
        self.coef = torch.ones((), device=device)
        self._clipping: Outliers | None = clipping

    def __call__(self, norm: Callable[[], Float32[Tensor, ""]], gate: Bool[Tensor, ""]) -> Float32[Tensor, ""]:
        """Returns `coef`, which the first call computes.

        Later calls repeat the update, or that of one tensor (`guard/checks/recheck.py`): the factor stays the step's.
        They do not compute the norm, for which sharded weights need the other ranks.
        """
        if self._clipping is not None:
            # Behind a closed gate the moments lack this step's gradient, so their update is none of this step.
            self.coef.copy_(torch.where(gate, self._clipping.factor(norm(), gate), 1.0))
            self._clipping = None
        return self.coef


@dataclass
class UpdateNormClip(Outliers):
    """Clipping of the update's norm.

    Attributes:
        z_threshold, alpha, warmup_steps: see `Outliers`.
        clips_updates: tells the trainer that the optimizer has to show its update.
    """

    z_threshold: float = 2.5
    alpha: float = 0.97
    warmup_steps: int = 25
    _statistics: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    NAMES: ClassVar[tuple[str, str, str]] = ("update_seen", "update_mean", "update_var")

    clips_updates: ClassVar[bool] = True

    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Changes no gradient: the optimizer's step scales its update, and so sets `coef`."""
        scale = StepScale(self, norms.total.device)
        return Clipped(scale.coef, scale_update=scale)
