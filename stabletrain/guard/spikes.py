"""Decides what counts as a spike in a loop about which nothing is known.

The limits are those of `guard/policy/limits.py`. One thing differs: a loss alone is no spike. In a language model, a
loss far above its recent values is one. In other loops a loss may be negative (densities, Boltzmann machines), may be
pulled in two directions (adversarial training), or may rise a thousandfold in the second step and come down again. So a
step is a spike if

    the gradient norm is above its limit, or
    the loss is above its limit, half a window of steps was applied, and the norm is above half of its limit
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from stabletrain.guard.policy import SkipGuard
from stabletrain.records import LARGEST, GradNorms, LossTerms, StepChecks

NORM_SHARE = 0.5
"""Share of its limit that the gradient norm must exceed for a high loss to be a spike."""


def bounds(policy: SkipGuard) -> tuple[float, float]:
    """Returns the limits of loss and gradient norm that hold now; while the window is cold, none for the loss."""
    limits = policy.limits
    return (limits.loss.value if limits.loss.warm else LARGEST), limits.norm.value


def gate(policy: SkipGuard, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Bool[Tensor, ""]:
    """Returns whether the step is finite and no spike, and the state is unchanged; 0-d, on the device."""
    loss_limit, norm_limit = bounds(policy)
    values = [terms.total.abs(), norms.total, terms.total, norms.total]
    limits = [LARGEST, norm_limit, loss_limit, NORM_SHARE * norm_limit]
    if isinstance(checks.buffers, Tensor):
        values, limits = [*values, checks.buffers], [*limits, LARGEST]
    if isinstance(checks.state_changed, Tensor):
        values, limits = [*values, checks.state_changed], [*limits, 0.0]
    if isinstance(checks.recheck, Tensor):
        values, limits = [*values, checks.recheck], [*limits, policy.recheck.limit("gradient")]
    # The sign of a difference is exact, and NaN <= 0 is False: NaN closes the gate.
    within = torch.stack(torch._foreach_sub(values, limits)) <= 0
    return within[:2].all() & (within[2] | within[3]) & within[4:].all()
