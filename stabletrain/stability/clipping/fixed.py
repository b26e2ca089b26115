"""Clipping to a fixed bound: none, norm, value and per_module.

norm: scales the whole gradient and keeps its direction. Pascanu et al., arXiv 1211.5063, section 3.2; the 1e-6 is
PyTorch's.

    g <- g * min(1, max_norm / (|g| + 1e-6)),      |g| over all parameters

value: clamps every value, which changes the gradient's direction. Equals `torch.nn.utils.clip_grad_value_`. Graves,
arXiv 1308.0850, clipped the derivatives that enter an LSTM this way.

    g_i <- max(-clip_value, min(clip_value, g_i))

per_module: scales each module's gradient separately, so that an outlier in one module does not shrink the gradients of
all others, as it does with global clipping. McMahan et al., arXiv 1710.06963, clip layers this way, there for privacy.

    g_m <- g_m * min(1, max_norm / |g_m|),      |g_m| over the parameters that module m owns directly

Every `nn.Module` with parameters of its own counts as a module: a linear layer with its bias, a norm, an embedding. A
parameter that several modules share belongs to the first.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.monitors.tensor_norms import gradients
from stabletrain.parallel.shards import is_sharded, local_parts, sum_over_shards
from stabletrain.records import Clipped, GradNorms


class NoClip:
    """No clipping. Base class of all kinds, and what each must offer."""

    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Changes nothing; reports a coefficient of 1.

        A kind rewrites every `.grad` in place and returns what it did. It must not synchronize with the host.

        Args:
            model: with unscaled gradients.
            norms: of these gradients.
            gate: whether this step's update will be applied. A skipped step must not enter a statistic.
        """
        return Clipped(1.0)

    def state_dict(self) -> dict:
        """Returns what later steps depend on, for a checkpoint: nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Ignores `state`: the checkpoint may come from a run with another kind of clipping, which had state."""


def check_above_zero(name: str, value: float, customary: str = "") -> None:
    """Raises ConfigError unless a bound is above 0; `customary` is advice such as `1.0 is customary; `."""
    if not value > 0:
        raise ConfigError(
            f"clipping.{name}={value} is not above 0: no gradient would be left; {customary}use clipping=none to "
            "switch clipping off"
        )


def multiply_(model: nn.Module, factor: Float32[Tensor, ""]) -> None:
    """Multiplies every gradient by `factor`, in place."""
    if found := gradients(model):
        torch._foreach_mul_(found, factor)


def clip_factor(
    norm: Float32[Tensor, "*shape"], bound: float | Float32[Tensor, "*shape"] | Float32[Tensor, ""]
) -> Float32[Tensor, "*shape"]:
    """Returns `bound / norm` where the norm is finite and above the bound, else exactly 1; always finite."""
    return torch.where(torch.isfinite(norm) & (norm > bound), bound / norm, 1.0)


def may_enter_statistics(norm: Float32[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Returns a mask of the norms that may enter a statistic: the square is finite and not 0, 4e-23 < norm < 1.8e19."""
    # A bound computed from norms of 0 would clip every later gradient to 0.
    square = norm * norm
    return torch.isfinite(square) & (square > 0)


def clipped_in_parts(norms: GradNorms, after: Float[Tensor, " n"], clipped: Float[Tensor, ""], units: int) -> Clipped:
    """Returns the report for a gradient whose parts were scaled separately.

    Args:
        norms: norms before clipping.
        after: norms of all parts after clipping, including parts that are never clipped.
        clipped: number of units that were clipped.
        units: number of units that may be clipped.
    """
    ratio = torch.nan_to_num(torch.linalg.vector_norm(after) / norms.total, nan=1.0).clamp(max=1.0)
    return Clipped(coef=torch.where(clipped > 0, ratio, 1.0), active=clipped / max(1, units))


def count(factors: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Returns how many factors clip."""
    return (factors < 1).float().sum()


@dataclass(frozen=True)
class NormClip(NoClip):
    """Global-norm clipping.

    Attributes:
        max_norm: largest L2 norm over all parameters; 0.5 to 1.0 is customary for transformers.
    """

    max_norm: float

    def __post_init__(self) -> None:
        check_above_zero("max_norm", self.max_norm)

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Scales every `.grad` in place by `coef`; for a finite norm bitwise equal to `clip_grad_norm_` of PyTorch."""
        factor = self.factor(norms)
        multiply_(model, factor)
        return Clipped(factor)

    def factor(self, norms: GradNorms) -> Float32[Tensor, ""]:
        """Returns what every gradient is multiplied by, at most 1."""
        finite = norms.total.nan_to_num(nan=0.0, posinf=0.0)  # a norm of 0 gives a factor of 1
        return (self.max_norm / (finite + 1e-6)).clamp(max=1.0)


@dataclass(frozen=True)
class ValueClip(NoClip):
    """Value clipping.

    Attributes:
        clip_value: largest magnitude of each value of a gradient.
    """

    clip_value: float

    def __post_init__(self) -> None:
        check_above_zero("clip_value", self.clip_value)

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Clamps every `.grad` in place, Inf included; `active` is the share of values clamped."""
        whole = [p.grad for p in model.parameters() if p.grad is not None]
        if not whole:
            return Clipped(1.0)
        values = local_parts(whole)
        cut = torch.stack([(value.abs() > self.clip_value).sum() for value in values])
        torch._foreach_clamp_min_(values, -self.clip_value)
        torch._foreach_clamp_max_(values, self.clip_value)
        # Clamping changes the direction, so the norm cannot be computed from a factor; in fp32, whatever the gradients.
        after = torch.stack(torch._foreach_norm(values, 2, dtype=torch.float32))
        if any(map(is_sharded, whole)):
            # One all-reduce for both. float64 squares and adds fp32 without overflow, and counts exactly.
            both = sum_over_shards(torch.stack([after.double().square(), cut.double()], dim=1), whole)
            after, cut = both[:, 0].sqrt().float(), both[:, 1]
        ratio = torch.nan_to_num(torch.linalg.vector_norm(after) / norms.total, nan=1.0).clamp(max=1.0)
        return Clipped(coef=ratio, active=cut.sum().float() / sum(gradient.numel() for gradient in whole))


def by_module(model: nn.Module) -> list[list[Tensor]]:
    """Returns the gradients of each module that owns some, in the order of `model.parameters()`; or their parts."""
    seen: set[nn.Parameter] = set()
    groups = []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p not in seen]
        seen.update(own)
        if group := local_parts(p.grad for p in own if p.grad is not None):
            groups.append(group)
    return groups


@dataclass(frozen=True)
class PerModuleClip(NoClip):
    """Per-module clipping.

    Attributes:
        max_norm: largest L2 norm of one module's gradient; the norm over m modules may reach sqrt(m) times that.
    """

    max_norm: float

    def __post_init__(self) -> None:
        check_above_zero("max_norm", self.max_norm)

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Scales every `.grad` in place by its module's factor; `active` is the share of modules clipped."""
        groups = by_module(model)
        if not groups:
            return Clipped(1.0)
        # `model.parameters()` goes module by module, so the norms of one module are adjacent in `norms.each`.
        sides = norms.each.split([len(group) for group in groups])
        before = torch.stack(torch._foreach_norm(list(sides), 2))
        factors = clip_factor(before, self.max_norm)
        for group, factor in zip(groups, factors.unbind(), strict=True):
            torch._foreach_mul_(group, factor)
        return clipped_in_parts(norms, before * factors, count(factors), len(factors))
