"""Clipping: gradients that are too long are shortened before the optimizer sees them.

A kind of clipping is called with the model, whose `.grad` it may rewrite, and with the norms measured before; it
returns the factor it applied, for the metrics. It is called after unscaling, so `max_norm` means the same in every
precision, and after the guard has judged, so a non-finite norm never decides anything here.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.records import GradNorms


@dataclass(frozen=True)
class NoClip:
    """Gradients stay as they are."""

    def __call__(self, model: nn.Module, norms: GradNorms) -> Float[Tensor, ""]:
        """The factor 1."""
        del model
        return torch.ones_like(norms.total)


@dataclass(frozen=True)
class NormClip:
    """Global-norm clipping: `g <- g * min(1, max_norm / (|g| + 1e-6))` (Pascanu et al., arXiv 1211.5063).

    Attributes:
        max_norm: largest L2 norm over all parameters; 0.5 to 1.0 is customary for transformers.
    """

    max_norm: float

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ConfigError(
                f"clipping.max_norm={self.max_norm} is not above 0: no gradient would be left; "
                "use clipping=none to switch clipping off"
            )

    def __call__(self, model: nn.Module, norms: GradNorms) -> Float[Tensor, ""]:
        """Scales every `.grad` in place, without a host read; returns the 0-d factor."""
        parameters = [p for p in model.parameters() if p.grad is not None]
        nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norms.total)
        return (self.max_norm / (norms.total + 1e-6)).clamp(max=1.0)  # the factor PyTorch just used
