"""AdamW and its variants for unstable training: StableAdamW and SPAM.

**AdamW**, the default for transformers:

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    w <- w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)

Loshchilov and Hutter, arXiv 1711.05101; the moments are Adam's, arXiv 1412.6980. Fused kernels are the default, because
they take the guard's gate on the device (`found_inf`): a skipped update costs no host read.

**StableAdamW**: AdamW that lowers a tensor's learning rate while its second moment is too small for its gradients.

    RMS = sqrt(mean(g^2 / max(v / (1 - b2^t), eps^2)))       v already contains this step's g
    lr  <- lr / max(1, RMS)                                  per tensor and step; weight decay keeps the full lr

If gradients grow faster than v follows, AdamW's update is too large by about RMS. This is Adafactor's update clipping
(arXiv 1804.04235) in AdamW; with RMS <= 1 it equals AdamW. Wortsman et al., arXiv 2304.13013, section 3.5: loss spikes
follow 1 to 8 steps after RMS rises. In the authors' code weight decay uses the full learning rate too.

**SPAM**: AdamW that clips spiking coordinates and resets its moments at a fixed interval.

    where v > 0 and g^2 > theta v:  g <- sign(g) sqrt(theta v)         v before this step, bias-corrected
    every `reset_interval` updates: m, v, t <- 0, and for `warmup_steps` updates the learning rate is multiplied by
                                    1 - 0.99 (1 + cos(pi k / (warmup_steps + 1))) / 2,  k = 0, 1, ...

One spiking gradient stays in m for tens of steps and in v for hundreds. Clipping keeps most of it out, and the reset
removes the rest. Huang et al., arXiv 2501.06842. The authors' code differs in three points. It does not restart the
bias correction at a reset. It compares with the uncorrected v, and therefore clips nothing in the 20 steps after a
reset. It also clips where v = 0, which freezes a coordinate that has had no gradient yet. In both versions weight decay
uses the full learning rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.parallel.shards import is_sharded, norms_over_shards
from stabletrain.stability.optimizers.gated import (
    GatedOptimizer,
    Moments,
    Update,
    adam_update,
    advance_,
    bias_correction,
    moments,
    root_of_second,
    subtract_,
    update_moments_,
    update_weights_,
)
from stabletrain.stability.parameter_roles import NO_DECAY, WeightDecay, check_moments, check_rates


@dataclass(frozen=True)
class AdamSettings:
    """What AdamW and its variants have in common.

    Attributes:
        lr: peak learning rate; warmup and schedule multiply it.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment; above 0.
        weight_decay: decoupled weight decay, at least 0.
        decay: kind of weight decay, see `parameter_roles.py`: `coupled`, `independent` or `corrected`.
        no_decay: roles of parameters without weight decay.
        cautious_decay: whether only those weights decay that the update moves towards 0 as well, see `cautious`.
        shows_update: whether `clipping` scales the update, so that it takes a `GatedOptimizer`; set by the trainer.
    """

    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    decay: str = field(default="coupled", kw_only=True)
    no_decay: Sequence[str] = field(default=NO_DECAY, kw_only=True)
    cautious_decay: bool = field(default=False, kw_only=True)
    shows_update: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_moments(self.betas, self.eps)
        WeightDecay(self.weight_decay, self.decay, self.no_decay)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameter groups of `model`'s trainable parameters, see `WeightDecay.groups`."""
        return WeightDecay(self.weight_decay, self.decay, self.no_decay).groups(model, self.lr)

    def adam(self) -> dict[str, Any]:
        """Returns the settings that every optimizer of this family takes."""
        return {"lr": self.lr, "betas": (self.betas[0], self.betas[1]), "eps": self.eps}

    def gated(self) -> dict[str, Any]:
        """Returns the settings of this package's own optimizers."""
        return {**self.adam(), "cautious": self.cautious_decay, "capturable": True}


@dataclass(frozen=True)
class AdamW(AdamSettings):
    """`torch.optim.AdamW`; or `GatedAdamW`, if something needs the update, which PyTorch's kernels do not show.

    Attributes:
        fused: one kernel for all parameters; False falls back to PyTorch's default implementation.
    """

    fused: bool = True

    def __call__(self, model: nn.Module) -> Optimizer:
        """Returns the optimizer over `model`'s trainable parameters."""
        if self.cautious_decay or self.shows_update:
            return GatedAdamW(self.groups(model), self.gated())
        return torch.optim.AdamW(self.groups(model), **self.adam(), fused=self.fused or None)


class GatedAdamW(GatedOptimizer):
    """AdamW with cautious weight decay, and with an update that can be scaled. Its state is that of PyTorch's AdamW.

    Closed, as AdamW is (`closed.py`).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Updates every parameter that has a gradient; changes nothing if `found_inf` is 1."""
        update_weights_(self, [found for group in self.param_groups if (found := adamw_update(self, group))])


def adamw_update(optimizer: Optimizer, group: dict[str, Any]) -> Update | None:
    """Adds a group's gradients to its moments and returns AdamW's update; None if no parameter has a gradient."""
    if (known := moments(optimizer, group)) is None:
        return None
    beta1, beta2 = group["betas"]
    counts = torch.stack(known.steps) + 1
    update_moments_(known, group)
    rates = group["lr"] / bias_correction(beta1, counts)
    update = adam_update(known, root_of_second(known, bias_correction(beta2, counts)), rates, group)
    advance_(known.steps, torch.ones_like(counts), known)
    return update


@dataclass(frozen=True)
class StableAdamW(AdamSettings):
    """AdamW with update clipping; `eps` is also the lower bound of the root of the second moment in RMS."""

    def __call__(self, model: nn.Module) -> Optimizer:
        """Returns the optimizer over `model`'s trainable parameters."""
        return CappedAdamW(self.groups(model), self.gated())


class CappedAdamW(GatedOptimizer):
    """PyTorch optimizer of `StableAdamW`; its state is AdamW's: `step`, `exp_avg`, `exp_avg_sq`.

    Closed, as AdamW is (`closed.py`): RMS only lowers the rate. g / max(sqrt(v), eps) is at most 1e33, and an infinite
    norm of these ratios would make the rate 0. v includes this step's g, so the bias correction is never 0.
    """

    @property
    def communicates(self) -> bool:
        """RMS is that of a whole tensor."""
        return any(is_sharded(weight) for group in self.param_groups for weight in group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Updates every parameter that has a gradient; changes nothing if `found_inf` is 1."""
        measured = []
        for group in self.param_groups:
            if (known := moments(self, group)) is None:
                continue
            counts = torch.stack(known.steps) + 1
            # The moments take in this step's gradient first, so that RMS sees it in v. If the update is withheld, they
            # stay as they are, and so does everything that is computed from them below.
            update_moments_(known, group)
            root = root_of_second(known, bias_correction(group["betas"][1], counts))
            measured.append((group, known, counts, root))
        if not measured:
            return
        updates = []
        spreads = rms([(known, root, group["eps"]) for group, known, _, root in measured])
        for (group, known, counts, root), spread in zip(measured, spreads, strict=True):
            rates = group["lr"] / bias_correction(group["betas"][0], counts) / spread.clamp(min=1)
            updates.append(adam_update(known, root, rates, group))
            advance_(known.steps, torch.ones_like(counts), known)
        update_weights_(self, updates)


def rms(groups: Sequence[tuple[Moments, list[Tensor], float]]) -> Sequence[Tensor]:
    """Returns sqrt(mean(g^2 / max(v, eps^2))) of each whole tensor, `[tensors]` for each group; usually about 1.

    Args:
        groups: gradients, roots of v, and eps. Those of sharded tensors are summed in one all-reduce for all groups.
    """
    norms, weights = [], [weight for known, _, _ in groups for weight in known.weights]
    for known, root, eps in groups:
        ratios = torch._foreach_div(known.gradients, torch._foreach_clamp_min(root, eps))
        norms.append(torch.stack(list(torch._foreach_norm(ratios))))
    whole = norms_over_shards(torch.cat(norms), weights)
    means = torch._foreach_div(list(whole.unbind()), [weight.numel() ** 0.5 for weight in weights])
    return torch.stack(list(means)).split([len(known.weights) for known, _, _ in groups])


RATE_AFTER_RESET = 0.01
"""Fraction of the learning rate right after a reset."""


@dataclass(frozen=True)
class SPAM(AdamSettings):
    """Spike-aware Adam with momentum reset.

    Attributes:
        theta: largest ratio of a squared gradient to its running mean, above 1.
        reset_interval: updates between two resets.
        warmup_steps: updates after a reset until the full learning rate is reached; below `reset_interval`.
    """

    theta: float
    reset_interval: int
    warmup_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.theta < math.inf:
            raise ConfigError(
                f"optimizer.theta={self.theta} is not a finite number above 1: ordinary gradients would be clipped; "
                "the paper uses 5000; use optimizer=adamw for no clipping of spikes"
            )
        if self.reset_interval < 1:
            raise ConfigError(f"optimizer.reset_interval={self.reset_interval} is below 1: the paper uses 500")
        if not 0 <= self.warmup_steps < self.reset_interval:
            raise ConfigError(
                f"optimizer.warmup_steps={self.warmup_steps} is outside [0, optimizer.reset_interval="
                f"{self.reset_interval}): the full learning rate would never be reached; lower optimizer.warmup_steps"
            )

    def __call__(self, model: nn.Module) -> Optimizer:
        """Returns the optimizer over `model`'s trainable parameters."""
        spikes = {"theta": self.theta, "reset_interval": self.reset_interval, "warmup_steps": self.warmup_steps}
        return SpikeAwareAdamW(self.groups(model), {**self.gated(), **spikes})


class SpikeAwareAdamW(GatedOptimizer):
    """PyTorch optimizer of `SPAM`.

    Its state is AdamW's, plus `resets`, the number of resets so far. `step` counts from the last reset, as the bias
    correction of the moments requires.

    Closed, as AdamW is (`closed.py`): clipping replaces g by a smaller value, and a reset sets m and v to 0 together,
    since x - 1 x = 0 for finite x. A bound of clipping may be inf, where v is 0 and after a reset, but is never NaN: a
    root of 0 is replaced by inf before it is multiplied, and theta / 0 = inf for theta > 0.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Updates every parameter that has a gradient; changes nothing if `found_inf` is 1."""
        updates = []
        for group in self.param_groups:
            if (known := moments(self, group, "resets")) is None:
                continue
            beta1, beta2 = group["betas"]
            # Reset the moments if due: subtract them from themselves. This is done per tensor, without a host read.
            done = torch.stack(known.steps)
            due = done >= group["reset_interval"]
            since = torch.where(due, 0, done)
            counted = [state["resets"] for state in known.states]
            resets = torch.stack(counted) + due
            both = [*known.first, *known.second]
            cleared = list(due.float().unbind())
            subtract_(both, list(torch._foreach_mul(both, [*cleared, *cleared])), known.withheld)
            # Clip spikes before the gradient enters the moments.
            clip_spikes_(known, bias_correction(beta2, since), group["theta"])
            update_moments_(known, group)
            # Update the weights. The learning rate warms up after a reset, but not at the start of the run.
            counts = since + 1
            warm = torch.where(resets > 0, rewarmup(since, group["warmup_steps"]), 1.0)
            rates = group["lr"] * warm / bias_correction(beta1, counts)
            updates.append(adam_update(known, root_of_second(known, bias_correction(beta2, counts)), rates, group))
            advance_(known.steps, counts - done, known)
            advance_(counted, due, known)
        update_weights_(self, updates)


def clip_spikes_(known: Moments, unbias: Tensor, threshold: float) -> None:
    """Clips `known.gradients`, in place, to +-sqrt(threshold * v) where v > 0.

    Args:
        known: holds the gradients, and v before this step's gradient.
        unbias: float64 `[tensors]`, the bias correction of v; 0 if v is all 0.
        threshold: theta.
    """
    # Compare square roots, because g^2 and threshold * v may overflow.
    limits = list(torch._foreach_sqrt(known.second))
    # Where v = 0, no gradient was seen yet, so there is nothing to compare with. 1 / sign(v) - 1 is inf there, else 0.
    never = list(torch._foreach_sign(known.second))
    torch._foreach_reciprocal_(never)
    torch._foreach_sub_(never, 1.0)
    torch._foreach_add_(limits, never)
    torch._foreach_mul_(limits, list((threshold / unbias).sqrt().unbind()))
    torch._foreach_minimum_(known.gradients, limits)
    torch._foreach_maximum_(known.gradients, torch._foreach_neg(limits))


def rewarmup(since: Tensor, warmup_steps: int) -> Tensor:
    """Returns the learning rate's factor `since` updates after a reset: 0.01 at 0, 1 from `warmup_steps` on."""
    rising = 1 - (1 - RATE_AFTER_RESET) * (1 + torch.cos(math.pi * since.double() / (warmup_steps + 1))) / 2
    return torch.where(since < warmup_steps, rising, 1.0)
