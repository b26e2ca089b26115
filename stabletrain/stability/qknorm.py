"""QK-norm: normalises queries and keys per head, which bounds the attention logits.

    q <- norm(q) * gain,   k <- norm(k) * gain        over the head dimension, before RoPE and the dot product

With gains of 1, |q| and |k| are at most sqrt(d), so no attention logit q·k / sqrt(d) exceeds sqrt(d), however large the
weights become. The growth of these logits makes transformers diverge at high learning rates (arXiv 2309.14322, section
3.1; first in arXiv 2302.05442).

A kind of QK-norm is called with the head dimension and returns one module. A model creates one for the queries and one
for the keys of each attention.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError


class HeadNorm(nn.Module):
    """A norm over the last dimension with a gain of 1 at the start."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.eps = eps


class HeadLayerNorm(HeadNorm):
    """LayerNorm over the last dimension with a gain and no bias, computed in fp32."""

    def forward(self, x: Float[Tensor, "*batch head_dim"]) -> Float[Tensor, "*batch head_dim"]:
        """Returns `x` normalised, in the dtype of `x`."""
        return F.layer_norm(widened(x), self.weight.shape, self.weight, None, self.eps).to(x.dtype)

    def start_near(self, x: Float[Tensor, "*batch head_dim"]) -> dict[str, Tensor]:
        """Returns parameters with which this norm changes vectors like `x` least: see `nearest_gain`."""
        wide = widened(x)
        centred = wide - wide.mean(dim=-1, keepdim=True)
        return {"weight": nearest_gain(centred, F.layer_norm(wide, self.weight.shape, None, None, self.eps))}


class HeadRMSNorm(HeadNorm):
    """RMSNorm over the last dimension with a gain, computed in fp32 (arXiv 1910.07467)."""

    def forward(self, x: Float[Tensor, "*batch head_dim"]) -> Float[Tensor, "*batch head_dim"]:
        """Returns `x` normalised, in the dtype of `x`."""
        return F.rms_norm(widened(x), self.weight.shape, self.weight, self.eps).to(x.dtype)

    def start_near(self, x: Float[Tensor, "*batch head_dim"]) -> dict[str, Tensor]:
        """Returns parameters with which this norm changes vectors like `x` least: see `nearest_gain`."""
        wide = widened(x)
        return {"weight": nearest_gain(wide, F.rms_norm(wide, self.weight.shape, None, self.eps))}


@dataclass(frozen=True)
class NoQKNorm:
    """No QK-norm. Base class of all kinds, and what each must offer."""

    def __call__(self, head_dim: int) -> nn.Module:
        """Returns the module that normalises queries or keys over the head dimension: the identity."""
        return nn.Identity()


@dataclass(frozen=True)
class LayerNormQK(NoQKNorm):
    """QK-LayerNorm, as in arXiv 2309.14322.

    Attributes:
        eps: added to the variance; 1e-6 in the paper.
    """

    eps: float

    def __post_init__(self) -> None:
        check_eps(self.eps)

    def __call__(self, head_dim: int) -> nn.Module:
        """Returns a norm over `head_dim` values, with gains of 1."""
        return HeadLayerNorm(head_dim, self.eps)


@dataclass(frozen=True)
class RMSNormQK(NoQKNorm):
    """QK-RMSNorm: does not subtract the mean; used by Gemma 3, Qwen 3 and OLMo 2 (arXiv 2501.00656).

    Attributes:
        eps: added to the mean square.
    """

    eps: float

    def __post_init__(self) -> None:
        check_eps(self.eps)

    def __call__(self, head_dim: int) -> nn.Module:
        """Returns a norm over `head_dim` values, with gains of 1."""
        return HeadRMSNorm(head_dim, self.eps)


def nearest_gain(
    x: Float[Tensor, "*batch head_dim"], normed: Float[Tensor, "*batch head_dim"]
) -> Float[Tensor, " dim"]:
    """Returns the gain of each channel with which normed vectors come nearest to the vectors themselves.

        gain_j = sum x_j n_j / sum n_j^2,   with x = r n:  the mean norm r (over sqrt(head_dim)), weighted by n_j^2

    A run that adds QK-norm to trained weights starts with these gains: only the differences in length between tokens
    and between heads are lost.
    """
    batch = tuple(range(x.ndim - 1))
    return (x * normed).sum(dim=batch) / normed.square().sum(dim=batch).clamp(min=torch.finfo(normed.dtype).tiny)


def widened(x: Tensor) -> Tensor:
    """Casts `x` to fp32, because a mean of squares may overflow or lose small terms in fp16; fp64 stays fp64."""
    return x if x.dtype == torch.float64 else x.float()


def check_eps(eps: float) -> None:
    """Raises ConfigError unless `eps` is above 0 and at most 1."""
    if not eps > 0:
        raise ConfigError(f"qknorm.eps={eps} is not above 0: a constant head would be divided by 0; 1e-6 is customary")
    if eps > 1:
        raise ConfigError(f"qknorm.eps={eps} is above 1: it would hide the size of the heads; 1e-6 is customary")
