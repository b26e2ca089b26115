"""Underflow: which gradients fp16 makes exactly 0 that fp32, from the same weights and batch, does not.

    lost(p) = elements of p's gradient that are 0 in fp16 and not in fp32 / elements that are not 0 in fp32

A dead unit, a token that is not in the batch and a frozen branch have zeros in fp32 as well and count for nothing.
Which loss scale would keep the rest is not reckoned but tried.

Source: Micikevicius et al., arXiv 1710.03740, section 3.2: below 2^-24, about 6e-8, fp16 has nothing but 0.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from stabletrain.forensics.replay import Take, fp32, ieee_kernels, perform, same
from stabletrain.forensics.repro import Repro, is_scaled

STARVED = 0.5
"""Share of its elements that a parameter must have lost to count."""

ENOUGH = 0.02
"""Share of the model that the parameters that count must make up: a bias before a norm, or of keys, whose gradient is 0
but for rounding, is far less."""

TRIED = tuple(2.0**power for power in range(16, 44, 4))
"""Loss scales that are tried, the smallest first."""

NAMED = 8
"""Parameters that are named, the worst hit first."""


@dataclass(frozen=True)
class Starved:
    """The gradient of one parameter.

    Attributes:
        name: of the parameter.
        numel: its elements.
        zeros, in_fp32: share of them that are exactly 0, in the step's precision and in fp32.
        lost: share, of those that are not 0 in fp32, that are 0 in the step's precision.
    """

    name: str
    numel: int
    zeros: float
    in_fp32: float
    lost: float


@dataclass(frozen=True)
class Underflow:
    """What of a step's gradients fp16 has lost.

    Attributes:
        loss_scale: at which.
        zeros, in_fp32: share of all elements that are exactly 0, in the step's precision and in fp32.
        hit: share of the model that the parameters make up that have lost more than `STARVED`.
        worst: of these parameters those that have lost the most elements.
        cure: the smallest loss scale tried at which no such share is lost and nothing overflows; None if there is none.
    """

    loss_scale: float
    zeros: float
    in_fp32: float
    hit: float
    worst: tuple[Starved, ...] = ()
    cure: float | None = None

    @property
    def real(self) -> bool:
        """Whether so much is lost that it is no matter of a few idle parameters."""
        return self.hit > ENOUGH


def underflow(repro: Repro) -> Underflow | None:
    """Compares the gradients of a step with those in fp32; None where it has no loss scale, or is not finite."""
    if not is_scaled(repro.tools.precision):
        return None
    with ieee_kernels():
        wide = gradients(fp32(repro), repro.step)
    narrow = gradients(same(repro), repro.step)
    if wide is None or narrow is None:
        return None
    found = compared(narrow, wide, repro.loss_scale)
    return replace(found, cure=cure(repro, wide)) if found.real else found


def gradients(take: Take, step: int) -> dict[str, Tensor] | None:
    """The unscaled gradients of a replay by parameter; None if they, or the loss, are not finite."""
    loss, norm, _ = perform(take.model, take.batches, take.tools, step)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return None
    return {name: p.grad for name, p in take.model.named_parameters() if p.grad is not None}


def compared(narrow: Mapping[str, Tensor], wide: Mapping[str, Tensor], loss_scale: float) -> Underflow:
    """What `narrow` gradients have lost of the `wide` ones."""
    each = [of(name, narrow[name], wide[name]) for name in wide if name in narrow and wide[name].numel()]
    whole = sum(one.numel for one in each)
    starved = [one for one in each if one.lost > STARVED]
    starved.sort(key=lambda one: -one.numel * (one.zeros - one.in_fp32))
    return Underflow(
        loss_scale,
        sum(one.zeros * one.numel for one in each) / max(whole, 1),
        sum(one.in_fp32 * one.numel for one in each) / max(whole, 1),
        sum(one.numel for one in starved) / max(whole, 1),
        tuple(starved[:NAMED]),
    )


def of(name: str, narrow: Tensor, wide: Tensor) -> Starved:
    """What one parameter's gradient has lost."""
    zero, there = narrow == 0, wide != 0
    zeros, present, lost = int(zero.sum()), int(there.sum()), int((zero & there).sum())
    return Starved(name, wide.numel(), zeros / wide.numel(), 1 - present / wide.numel(), lost / max(present, 1))


def cure(repro: Repro, wide: Mapping[str, Tensor]) -> float | None:
    """The smallest loss scale, of those tried, that keeps the gradients; None if all lose too much or overflow."""
    for scale in (scale for scale in TRIED if scale > repro.loss_scale):
        if time.monotonic() >= repro.deadline:
            return None
        narrow = gradients(same(replace(repro, loss_scale=scale)), repro.step)
        if narrow is None:
            return None
        if not compared(narrow, wide, scale).real:
            return scale
    return None
