"""Global-norm clipping: the whole gradient is shortened, in its own direction, to a fixed norm.

    g <- g * min(1, max_norm / (|g| + 1e-6)),      |g| over all parameters

Source: Pascanu et al., arXiv 1211.5063, section 3.2; the 1e-6 is PyTorch's.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.records import Clipped, GradNorms
from stabletrain.stability.clipping.factors import Stateless, multiply_, whole


@dataclass(frozen=True)
class NormClip(Stateless):
    """Global-norm clipping.

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

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Scales every `.grad` in place by `coef`; bit for bit what `torch.nn.utils.clip_grad_norm_` does."""
        del gate
        factor = (self.max_norm / (norms.total + 1e-6)).clamp(max=1.0)
        factor = torch.where(torch.isfinite(norms.total), factor, 1.0)
        multiply_(model, factor)
        return whole(factor)
