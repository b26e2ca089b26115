"""No clipping: the object that stands where none is wanted."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from stabletrain.records import Clipped, GradNorms
from stabletrain.stability.clipping.factors import Stateless, whole


@dataclass(frozen=True)
class NoClip(Stateless):
    """Gradients stay as they are."""

    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Nothing clipped."""
        del model, gate
        return whole(torch.ones_like(norms.total))
