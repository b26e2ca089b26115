"""Clipping to a fixed bound: none, norm, value and per_module.

No clipping: the object that stands where none is wanted.

Global-norm clipping: the whole gradient is shortened, in its own direction, to a fixed norm.

    g <- g * min(1, max_norm / (|g| + 1e-6)),      |g| over all parameters

Source: Pascanu et al., arXiv 1211.5063, section 3.2; the 1e-6 is PyTorch's.

Value clipping: every value of every gradient is cut to an interval, which changes the gradient's direction.

    g_i <- max(-clip_value, min(clip_value, g_i))

As `torch.nn.utils.clip_grad_value_`. After Graves, arXiv 1308.0850, who so cut the derivatives that enter an LSTM.

Per-module clipping: each module's gradient is shortened by itself, so that one outlier does not throttle all.

    g_m <- g_m * min(1, max_norm / |g_m|),      |g_m| over the parameters that module m owns itself

Global clipping divides every gradient by what may be one embedding's burst: a batch of rare tokens then costs the whole
model a step. A module is whatever `nn.Module` holds parameters of its own (a linear layer with its bias, a norm, an
embedding); a parameter that several share belongs to the first. Layers were so clipped by McMahan et al., arXiv
1710.06963, there for privacy.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.monitors.tensor_norms import gradients
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


@dataclass(frozen=True)
class NoClip(Stateless):
    """Gradients stay as they are."""

    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Nothing clipped."""
        del model, gate
        return whole(torch.ones_like(norms.total))


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


def by_module(model: nn.Module) -> list[list[Tensor]]:
    """The gradients of each module that owns some, in the order of `model.parameters()`."""
    seen: set[nn.Parameter] = set()
    groups = []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p not in seen]
        seen.update(own)
        if group := [p.grad for p in own if p.grad is not None]:
            groups.append(group)
    return groups


@dataclass(frozen=True)
class PerModuleClip(Stateless):
    """Per-module clipping.

    Attributes:
        max_norm: largest L2 norm of one module's gradient; m modules may reach sqrt(m) times that together.
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
        """Scales every `.grad` in place by its module's factor; `active` is the share of modules clipped."""
        del gate
        groups = by_module(model)
        if not groups:
            return whole(torch.ones_like(norms.total))
        # `model.parameters()` goes module by module, so a module's norms lie side by side
        sides = norms.each.split([len(group) for group in groups])
        before = torch.stack(torch._foreach_norm(list(sides), 2))
        factors = shortening(before, self.max_norm)
        for group, factor in zip(groups, factors.unbind(), strict=True):
            torch._foreach_mul_(group, factor)
        return in_parts(norms, before * factors, factors)
