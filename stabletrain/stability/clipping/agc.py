"""AGC, adaptive gradient clipping: each output unit's gradient is bounded by a share of the unit's own weights.

    G_i <- G_i * min(1, clipping * max(|W_i|, eps) / |G_i|),      i: a unit

A step then moves no unit by more than a share of itself, whatever the depth: it is what lets norm-free ResNets train at
large batches. Source: Brock et al., arXiv 2102.06171, section 4.

A unit is a row of a matrix, a filter of a convolution kernel: all dimensions but the first. What is only a vector
(biases, gains, also a gain of shape `[channels, 1, 1, 1]`) is one unit, as in the authors' code. A row of an embedding
is a unit too: it is one token's vector, with a gradient of its own, so that a burst in one rare token touches no other.
The final classifier, as `roles.classifier` finds it, is not clipped, which the paper found to be better (section 4.1);
where a GPT's head is tied, that is the embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.records import Clipped, GradNorms
from stabletrain.stability.clipping.factors import Stateless, in_parts, shortening, whole
from stabletrain.stability.roles import classifier


def unit_norms(x: Tensor) -> Float32[Tensor, "..."]:
    """L2 norm of each unit of `x` in fp32, with as many dimensions as `x`: `[rows, 1, ...]`, or `[1, ...]`."""
    vector = sum(size > 1 for size in x.shape) <= 1
    over = range(x.ndim) if vector else range(1, x.ndim)
    return torch.linalg.vector_norm(x, dim=tuple(over), keepdim=True, dtype=torch.float32)


def flat(norms: Sequence[Tensor]) -> Float32[Tensor, " units"]:
    """The units of all tensors, one after the other."""
    return torch.cat([norm.flatten() for norm in norms])


@dataclass(frozen=True)
class AGC(Stateless):
    """Adaptive gradient clipping.

    Attributes:
        clipping: largest |G_i| / |W_i|, lambda in the paper: 0.01 for batches up to 4096 there, more for smaller ones.
        eps: least |W_i| that counts, so that units that start at 0 can leave it.
    """

    clipping: float = 0.01
    eps: float = 1e-3

    def __post_init__(self) -> None:
        for name, usual in (("clipping", 0.01), ("eps", 1e-3)):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(
                    f"clipping.{name}={value} is not above 0: no gradient would be left; {usual} is customary, "
                    "clipping=none switches clipping off"
                )

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Scales every unit's `.grad` in place; `active` is the share of units clipped, the classifier's left out."""
        del gate
        last = classifier(model)
        excluded = set() if last is None else set(last.parameters(recurse=False))
        trained = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        clipped = [(p, gradient) for p, gradient in trained if p not in excluded]
        if not clipped:
            return whole(torch.ones_like(norms.total))
        measured = [unit_norms(gradient) for _, gradient in clipped]
        before = flat(measured)
        factors = shortening(before, self.clipping * flat([unit_norms(p) for p, _ in clipped]).clamp(min=self.eps))
        each = factors.split([norm.numel() for norm in measured])
        for (_, gradient), factor, norm in zip(clipped, each, measured, strict=True):
            gradient.mul_(factor.view(norm.shape))
        kept = [norms.each[i : i + 1] for i, (p, _) in enumerate(trained) if p in excluded]
        return in_parts(norms, torch.cat([before * factors, *kept]), factors)
