"""The factors that shorten gradients, and which norms may enter a statistic: what the kinds of clipping share."""

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from stabletrain.monitors.gradients import gradients
from stabletrain.records import Clipped, GradNorms


class Stateless:
    """What is mixed into a kind without memory: its state is empty, and any other kind's state is nothing to it."""

    def state_dict(self) -> dict:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Nothing; a checkpoint of a kind with memory may be resumed without it."""
        del state


def multiply_(model: nn.Module, factor: Float32[Tensor, ""]) -> None:
    """Multiplies every gradient by `factor`, in place; a model may have none."""
    if found := gradients(model):
        torch._foreach_mul_(found, factor)


def shortening(
    norm: Float32[Tensor, "*shape"], bound: float | Float32[Tensor, "*shape"] | Float32[Tensor, ""]
) -> Float32[Tensor, "*shape"]:
    """`bound / norm` where the norm is finite and above the bound, else exactly 1: 0 / 0 and Inf never come up."""
    return torch.where(torch.isfinite(norm) & (norm > bound), bound / norm, 1.0)


def counts(norm: Float32[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Whether a norm may enter a statistic: its square is finite and not 0, that is 4e-23 < norm < 1.8e19.

    A norm of 0 says nothing about the norms to come, and as the least or the mean of them would stop the training of
    what it belongs to.
    """
    square = norm * norm
    return torch.isfinite(square) & (square > 0)


def whole(factor: Float32[Tensor, ""]) -> Clipped:
    """What is reported where the whole gradient was multiplied by `factor`."""
    return Clipped(coef=factor, active=(factor < 1).float())


def in_parts(norms: GradNorms, after: Float[Tensor, " n"], factors: Float[Tensor, " m"]) -> Clipped:
    """What is reported where parts of the gradient were multiplied by `factors`, each its own.

    Args:
        norms: before clipping.
        after: norms of all parts after clipping, those that are never clipped too.
        factors: of the parts that are clipped one by one; there may be none.
    """
    clipped = factors < 1
    ratio = torch.nan_to_num(torch.linalg.vector_norm(after) / norms.total, nan=1.0).clamp(max=1.0)
    return Clipped(
        coef=torch.where(clipped.any(), ratio, 1.0),
        active=clipped.float().sum() / max(1, len(factors)),
    )
