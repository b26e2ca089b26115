"""Clipping whose bound follows the weights (agc) or earlier gradient norms (adagc, zclip).

**AGC**, adaptive gradient clipping: bounds each output unit's gradient by a fraction of the unit's weight norm.

    G_i <- G_i * min(1, clipping * max(|W_i|, eps) / |G_i|),      i: a unit

This bound makes it possible to train norm-free ResNets at large batch sizes. Source: Brock et al., arXiv 2102.06171,
section 4.

A unit is a row of a matrix or a filter of a convolution kernel: all dimensions but the first. A parameter that is only
a vector (a bias, a gain, also a gain of shape `[channels, 1, 1, 1]`) is one unit, as in the authors' code. Each row of
an embedding is a unit too, so a burst in one rare token does not affect other tokens. The final classifier
(`parameter_roles.classifier`) is not clipped, which the paper found to work better (section 4.1). If a GPT's head is
tied, the classifier is the embedding.

**AdaGC**: bounds each tensor's gradient by a running average of its own norms.

    g_i <- g_i * min(1, growth * gamma_i / |g_i|),      gamma_i <- beta gamma_i + (1 - beta) |g_i|

|g_i| in the second formula is the clipped norm. In the first `warmup_steps` steps the whole gradient is clipped to
`max_norm` instead, and gamma_i is the smallest clipped norm so far, so that the average does not start from the large
norms right after init. Source: Wang et al., arXiv 2502.11034.

A tensor without a gradient in a step keeps its gamma. A tensor that has no gamma yet is clipped with the global factor.

**ZClip**: shortens the whole gradient if its norm is an outlier among recent norms.

    z = (|g| - mean) / (std + 1e-6)
    |g| <- mean + z_threshold^2 std / z   if z > z_threshold,      then   |g| <- min(|g|, max_norm)

The further a norm is from the mean, the closer to the mean it is clipped. `mean` and `std` are those of the first
`warmup_steps` norms, then moving averages: `mean <- alpha mean + (1 - alpha) |g|`,
`std^2 <- alpha std^2 + (1 - alpha) (|g| - mean)^2` with the new mean. During the warm-up only `max_norm` bounds the
gradient. Source: Kumar et al., arXiv 2504.02507.

The statistics use the norm after both bounds. The authors' code uses the norm before `max_norm`, and unclipped norms
during the warm-up, so that one spike there makes the threshold useless for hundreds of steps. If `max_norm` is never
reached, both are the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float32
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.monitors.tensor_norms import gradients
from stabletrain.parallel.shards import is_sharded, local_parts, norms_over_shards, sum_over_shards
from stabletrain.records import Clipped, GradNorms
from stabletrain.stability.clipping.fixed import (
    NoClip,
    check_above_zero,
    clip_factor,
    clipped_in_parts,
    count,
    may_enter_statistics,
    multiply_,
)
from stabletrain.stability.parameter_roles import classifier


def is_vector(x: Tensor) -> bool:
    """Returns whether a parameter is one unit: at most one of its dimensions is larger than 1."""
    return sum(size > 1 for size in x.shape) <= 1


def unit_norms(tensors: Sequence[Tensor]) -> list[Float32[Tensor, "..."]]:
    """Returns the L2 norms of the units of each tensor in fp32, with reduced dimensions kept.

    `[rows, 1, ...]` for the rows of this rank, if the tensor is sharded; `[1, ...]` for the part of a vector.
    """
    found = []
    for whole, part in zip(tensors, local_parts(tensors), strict=True):
        over = tuple(range(0 if is_vector(whole) else 1, whole.ndim))
        found.append(torch.linalg.vector_norm(part, dim=over, keepdim=True, dtype=torch.float32))
    return found


def flat(norms: Sequence[Tensor]) -> Float32[Tensor, " units"]:
    """Concatenates the unit norms of all tensors."""
    return torch.cat([norm.flatten() for norm in norms])


def of_all_ranks(
    tensors: Sequence[Tensor], norms: Sequence[Tensor], factors: Sequence[Tensor]
) -> tuple[Float32[Tensor, " tensors"], Float32[Tensor, ""]]:
    """Returns the norm of each whole tensor, and how many units were clipped, in one all-reduce.

    Args:
        tensors: sharded tensors.
        norms: of the units of this rank's part of each, after clipping.
        factors: of these units.
    """
    order = sorted(range(len(tensors)), key=lambda index: is_vector(tensors[index]))  # vectors last
    masks = [(factors[index] < 1).float() for index in order]
    rows = [torch.stack(torch._foreach_norm([norms[index] for index in order], 2)).double().square()]
    rows += [torch.stack(torch._foreach_norm(masks, 1)).double()]
    squares, cut = sum_over_shards(torch.stack(rows, dim=1), [tensors[index] for index in order]).unbind(dim=1)
    vectors = sum(map(is_vector, tensors))
    # Each rank has other rows of a matrix, but the same factor of a vector.
    once = torch.cat([cut[: len(order) - vectors], cut[len(order) - vectors :].clamp(max=1)])
    return squares.sqrt().float(), once.sum().float()


def of_whole_vectors(norms: list[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the same unit norms, those of sharded vectors over all their parts, in one all-reduce."""
    split = [index for index, tensor in enumerate(tensors) if is_vector(tensor) and is_sharded(tensor)]
    if not split:
        return norms
    whole = norms_over_shards(flat([norms[index] for index in split]), [tensors[index] for index in split])
    found = [*norms]
    for index, norm in zip(split, whole.unbind(), strict=True):
        found[index] = norm.view_as(norms[index])
    return found


@dataclass(frozen=True)
class AGC(NoClip):
    """Adaptive gradient clipping.

    Attributes:
        clipping: largest |G_i| / |W_i|, lambda in the paper: 0.01 for batches up to 4096 there, more for smaller ones.
        eps: lower bound of |W_i|, so that units initialized to 0 can train.
    """

    clipping: float = 0.01
    eps: float = 1e-3

    def __post_init__(self) -> None:
        check_above_zero("clipping", self.clipping, "0.01 is customary; ")
        check_above_zero("eps", self.eps, "0.001 is customary; ")
        if self.eps > 1:
            raise ConfigError(f"clipping.eps={self.eps} is above 1: no weight would be as large; 0.001 is customary")

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Scales every unit's `.grad` in place; `active` is the share of clipped units, not counting the classifier."""
        last = classifier(model)
        excluded = set() if last is None else set(last.parameters(recurse=False))
        trained = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        clipped = [(p, gradient) for p, gradient in trained if p not in excluded]
        if not clipped:
            return Clipped(1.0)
        found, number = [gradient for _, gradient in clipped], len(clipped)
        both = [*found, *(p for p, _ in clipped)]
        own = unit_norms(both)
        measured = of_whole_vectors(own, both)
        # Compute the factors of all units in one vector, so that few kernels run.
        before, sizes = flat(measured[:number]), [norm.numel() for norm in measured[:number]]
        factors = clip_factor(before, self.clipping * flat(measured[number:]).clamp(min=self.eps))
        for part, factor, norm in zip(local_parts(found), factors.split(sizes), measured[:number], strict=True):
            part.mul_(factor.view(norm.shape))
        after, cut = before * factors, count(factors)
        if any(map(is_sharded, found)):
            after, cut = of_all_ranks(found, (flat(own[:number]) * factors).split(sizes), factors.split(sizes))
        # The reported coefficient covers the whole gradient, so add the norms of the classifier.
        kept = [norms.each[i : i + 1] for i, (p, _) in enumerate(trained) if p in excluded]
        units = sum(1 if is_vector(gradient) else len(gradient) for gradient in found)
        return clipped_in_parts(norms, torch.cat([after, *kept]), cut, units)


@dataclass
class AdaGC(NoClip):
    """AdaGC.

    Attributes:
        max_norm: largest L2 norm over all parameters during the warm-up, lambda_abs in the paper.
        growth: largest ratio of a tensor's norm to its gamma, lambda_rel in the paper.
        beta: decay of gamma per step.
        warmup_steps: steps of global clipping at the start.
    """

    max_norm: float = 1.0
    growth: float = 1.05
    beta: float = 0.98
    warmup_steps: int = 100
    _seen: Tensor | None = field(default=None, init=False, repr=False)
    _gamma: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_above_zero("max_norm", self.max_norm, "1.0 is customary; ")
        if not self.growth > 1:
            raise ConfigError(
                f"clipping.growth={self.growth} is not above 1: no norm could ever rise again; 1.05 is customary"
            )
        if not 0 <= self.beta < 1:
            raise ConfigError(f"clipping.beta={self.beta} is outside [0, 1): 0.98 is customary")
        if self.warmup_steps < 1:
            raise ConfigError(
                f"clipping.warmup_steps={self.warmup_steps} is below 1: without a warm-up there is no norm to "
                "compare with; 100 is customary"
            )

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Scales every `.grad` in place by its tensor's factor; updates the statistics if `gate` is open.

        `active` is the share of tensors clipped: during the warm-up all or none.
        """
        names = [name for name, p in model.named_parameters() if p.grad is not None]
        if not names:
            return Clipped(1.0)
        # By name, which a checkpoint stores: after a resume the parameters are other objects.
        seen, gamma = self._statistics_on(norms.each.device, names)
        warming, known = seen < self.warmup_steps, gamma > 0
        # Use global clipping during the warm-up, and for tensors that have no gamma yet.
        together = clip_factor(norms.total, self.max_norm).expand_as(gamma)
        factors = torch.where(warming | ~known, together, clip_factor(norms.each, self.growth * gamma))
        torch._foreach_mul_(gradients(model), list(factors.unbind()))
        after = norms.each * factors
        # Update the gammas: the smallest norm during the warm-up, a moving average after it. A gamma rises by at most
        # a factor of beta + (1 - beta) growth per step (1.001 with the paper's values), so it would take long to
        # recover from a norm that is far too small.
        taken = gate & may_enter_statistics(norms.total)
        least = torch.where(known, torch.minimum(gamma, after), after)
        averaged = torch.where(known, self.beta * gamma + (1 - self.beta) * after, after)
        moved = torch.where(warming, least, averaged)
        self._gamma |= zip(names, torch.where(taken & may_enter_statistics(after), moved, gamma).unbind(), strict=True)
        self._seen = seen + taken
        return clipped_in_parts(norms, after, count(factors), len(factors))

    def _statistics_on(self, device: torch.device, names: list[str]) -> tuple[Tensor, Float32[Tensor, " n"]]:
        """Returns the steps counted so far (int64) and each tensor's gamma (0 if it has none yet), on `device`."""
        seen = torch.zeros((), dtype=torch.int64, device=device) if self._seen is None else self._seen.to(device)
        none = torch.zeros((), device=device)
        return seen, torch.stack([self._gamma.get(name, none).to(device) for name in names])

    def state_dict(self) -> dict:
        """Returns the statistics by parameter name; empty before the first step."""
        if self._seen is None:
            return {}
        return {"seen": self._seen, "names": list(self._gamma), "gamma": torch.stack(list(self._gamma.values()))}

    def load_state_dict(self, state: dict) -> None:
        """Restores the statistics; resets them if `state` is of another kind of clipping."""
        self._seen = state["seen"] if "gamma" in state else None
        self._gamma = dict(zip(state["names"], state["gamma"].unbind(), strict=True)) if "gamma" in state else {}


class Outliers(NoClip):
    """Bounds a norm that is an outlier among recent norms. Base class of `ZClip` and `UpdateNormClip`.

    Attributes:
        z_threshold: standard deviations above the mean beyond which a norm is clipped.
        alpha: decay of the statistics per step.
        warmup_steps: norms to collect before clipping by z starts.
    """

    z_threshold: float
    alpha: float
    warmup_steps: int
    _statistics: dict[str, Tensor]

    NAMES: ClassVar[tuple[str, str, str]] = ("seen", "mean", "var")
    """Names in the state, which differ between kinds: the norms of one are no statistics for another."""

    def __post_init__(self) -> None:
        check_above_zero("z_threshold", self.z_threshold, "2.5 is customary; ")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"clipping.alpha={self.alpha} is outside (0, 1): 0.97 is customary")
        if self.warmup_steps < 2:
            raise ConfigError(
                f"clipping.warmup_steps={self.warmup_steps} is below 2: one norm has no spread; 25 is customary"
            )

    def factor(
        self, norm: Float32[Tensor, ""], gate: Bool[Tensor, ""], max_norm: float = math.inf
    ) -> Float32[Tensor, ""]:
        """Returns what shortens `norm` to its bound, in (0, 1]; updates the statistics if `gate` is open.

        Args:
            max_norm: largest bound.
        """
        seen, mean, var = self._statistics_on(norm.device)
        std = var.sqrt()
        z = (norm - mean) / (std + 1e-6)
        stands_out = (seen >= self.warmup_steps) & (z > self.z_threshold)
        bound = torch.where(stands_out, mean + self.z_threshold**2 * std / z, max_norm).clamp(max=max_norm)
        factor = clip_factor(norm, bound)
        # A NaN would stay in the mean forever.
        self._update_statistics(norm * factor, gate & may_enter_statistics(norm))
        return factor

    def _statistics_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the number of norms seen (int64), their mean and their variance (fp32), on `device`."""
        if not self._statistics:
            zero = torch.zeros((), device=device)
            self._statistics = dict(
                zip(self.NAMES, (torch.zeros_like(zero, dtype=torch.int64), zero, zero), strict=True)
            )
        self._statistics = {name: value.to(device) for name, value in self._statistics.items()}
        seen, mean, var = (self._statistics[name] for name in self.NAMES)
        return seen, mean, var

    def _update_statistics(self, norm: Float32[Tensor, ""], taken: Bool[Tensor, ""]) -> None:
        """Updates the statistics with `norm` if `taken`."""
        seen, mean, var = (self._statistics[name] for name in self.NAMES)
        # During the warm-up all norms have the same weight; then the averages move.
        warming = seen < self.warmup_steps
        weight = torch.where(warming, 1.0 / (seen + 1), 1.0 - self.alpha)
        new_mean = mean + weight * (norm - mean)
        # Warm-up: Welford's exact update of a population variance. Later: the authors' moving variance.
        square = (norm - new_mean) * torch.where(warming, norm - mean, norm - new_mean)
        new_var = var + weight * (square - var)
        new = seen + taken, torch.where(taken, new_mean, mean), torch.where(taken, new_var, var)
        self._statistics = dict(zip(self.NAMES, new, strict=True))

    def state_dict(self) -> dict:
        """Returns the statistics; empty before the first step."""
        return dict(self._statistics)

    def load_state_dict(self, state: dict) -> None:
        """Restores the statistics; resets them if `state` is of another kind of clipping."""
        self._statistics = {name: state[name] for name in self.NAMES} if self.NAMES[1] in state else {}


@dataclass
class ZClip(Outliers):
    """ZClip.

    Attributes:
        max_norm: largest L2 norm over all parameters, applied in every step.
        z_threshold, alpha, warmup_steps: see `Outliers`.
    """

    max_norm: float = 1.0
    z_threshold: float = 2.5
    alpha: float = 0.97
    warmup_steps: int = 25
    _statistics: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_above_zero("max_norm", self.max_norm, "1.0 is customary; ")
        super().__post_init__()

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Scales every `.grad` in place by `coef`; updates the statistics if `gate` is open."""
        factor = self.factor(norms.total, gate, self.max_norm)
        multiply_(model, factor)
        return Clipped(factor)
