"""Value clipping: every value of every gradient is cut to an interval, which changes the gradient's direction.

    g_i <- max(-clip_value, min(clip_value, g_i))

As `torch.nn.utils.clip_grad_value_`. After Graves, arXiv 1308.0850, who so cut the derivatives that enter an LSTM.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.records import Clipped, GradNorms
from stabletrain.stability.clipping.factors import Stateless, gradients, whole


@dataclass(frozen=True)
class ValueClip(Stateless):
    """Value clipping.

    Attributes:
        clip_value: largest magnitude of a gradient's value.
    """

    clip_value: float

    def __post_init__(self) -> None:
        if not self.clip_value > 0:
            raise ConfigError(
                f"clipping.clip_value={self.clip_value} is not above 0: no gradient would be left; "
                "use clipping=none to switch clipping off"
            )

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Clamps every `.grad` in place, also Inf to a finite value; `active` is the share of values cut."""
        del gate
        values = gradients(model)
        if not values:
            return whole(torch.ones_like(norms.total))
        cut = torch.stack([(value.abs() > self.clip_value).sum() for value in values]).sum()
        torch._foreach_clamp_min_(values, -self.clip_value)
        torch._foreach_clamp_max_(values, self.clip_value)
        after = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values, 2, dtype=torch.float32)))
        ratio = torch.nan_to_num(after / norms.total, nan=1.0).clamp(max=1.0)
        return Clipped(coef=ratio, active=cut.float() / sum(value.numel() for value in values))
