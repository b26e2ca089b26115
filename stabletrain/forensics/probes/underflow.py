"""Finds gradients that are exactly 0 in fp16 or fp8 but not in fp32, for the same weights and batch.

    lost(p) = elements of p's gradient that are 0 in fp16 (or fp8) and not in fp32 / elements that are not 0 in fp32

Zeros of dead units, tokens absent from the batch and frozen branches are 0 in fp32 as well and do not count. In fp16, a
loss scale that avoids the underflow is found by trying.

Source: Micikevicius et al., arXiv 1710.03740, section 3.2. The smallest positive fp16 number is 2^-24, about 6e-8.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from stabletrain.forensics.replay import ReplayInputs, inputs_of
from stabletrain.forensics.repro import Repro
from stabletrain.forensics.rerun import is_scaled
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.precision.fp8_linear import Fp8Linears

LOST_SHARE = 0.5
"""Share of its gradient elements above which a parameter counts as lost."""

REAL_SHARE = 0.02
"""Share of the model's elements in lost parameters above which the underflow is real.

Parameters whose gradient is 0 except for rounding, such as a bias before a norm or a bias of keys, are far fewer.
"""

LOSS_SCALES = tuple(2.0**power for power in range(16, 44, 4))
"""Loss scales to try, ascending."""

MAX_LISTED = 8
"""Maximum number of parameters to list."""


@dataclass(frozen=True)
class LostGradient:
    """Underflow in the gradient of one parameter.

    Attributes:
        zeros, in_fp32: share of elements that are exactly 0, in the step's precision and in fp32.
        lost: of the elements that are not 0 in fp32, the share that is 0 in the step's precision.
    """

    name: str
    numel: int
    zeros: float
    in_fp32: float
    lost: float


@dataclass(frozen=True)
class Underflow:
    """Underflow in a step's gradients.

    Attributes:
        zeros, in_fp32: share of all elements that are exactly 0, in the step's precision and in fp32.
        lost_share: share of the model's elements in parameters that lost more than `LOST_SHARE`.
        worst: those parameters that lost the most elements.
        sufficient_scale: smallest loss scale tried without underflow or overflow; None if there is none.
    """

    loss_scale: float
    zeros: float
    in_fp32: float
    lost_share: float
    worst: tuple[LostGradient, ...] = ()
    sufficient_scale: float | None = None

    @property
    def real(self) -> bool:
        """Whether more is lost than a few idle parameters explain."""
        return self.lost_share > REAL_SHARE


def underflow(repro: Repro) -> Underflow | None:
    """Compares a step's gradients with those in fp32; None in precisions without underflow, or if one is not finite."""
    if not can_underflow(repro.tools.precision):
        return None
    wide, narrow = gradients(inputs_of(repro, "fp32")), gradients(inputs_of(repro))
    if wide is None or narrow is None:
        return None
    found = measure(narrow, wide, repro.loss_scale)
    scaled = is_scaled(repro.tools.precision)
    return replace(found, sufficient_scale=find_loss_scale(repro, wide)) if found.real and scaled else found


def can_underflow(precision: FullPrecision) -> bool:
    """Whether gradients can be 0 in this precision although they are not in fp32: in fp16 and fp8."""
    return is_scaled(precision) or isinstance(precision, Fp8Linears)


def gradients(inputs: ReplayInputs) -> dict[str, Tensor] | None:
    """The unscaled gradients of a replay by parameter; None if they or the loss are not finite."""
    found = inputs.run()
    if not (math.isfinite(found.loss) and math.isfinite(found.grad_norm)):
        return None
    named = zip(inputs.model.named_parameters(), found.gradients, strict=True)
    return {name: gradient for (name, _), gradient in named if gradient is not None}


def measure(narrow: Mapping[str, Tensor], wide: Mapping[str, Tensor], loss_scale: float) -> Underflow:
    """Measures what the `narrow` gradients lose of the `wide` ones."""
    each = [measure_one(name, narrow[name], wide[name]) for name in wide if name in narrow and wide[name].numel()]
    whole = sum(one.numel for one in each)
    starved = [one for one in each if one.lost > LOST_SHARE]
    starved.sort(key=lambda one: -one.numel * (one.zeros - one.in_fp32))
    return Underflow(
        loss_scale,
        sum(one.zeros * one.numel for one in each) / max(whole, 1),
        sum(one.in_fp32 * one.numel for one in each) / max(whole, 1),
        sum(one.numel for one in starved) / max(whole, 1),
        tuple(starved[:MAX_LISTED]),
    )


def measure_one(name: str, narrow: Tensor, wide: Tensor) -> LostGradient:
    """Measures the underflow of one parameter's gradient."""
    zero, there = narrow == 0, wide != 0
    zeros, present, lost = int(zero.sum()), int(there.sum()), int((zero & there).sum())
    return LostGradient(name, wide.numel(), zeros / wide.numel(), 1 - present / wide.numel(), lost / max(present, 1))


def find_loss_scale(repro: Repro, wide: Mapping[str, Tensor]) -> float | None:
    """The smallest loss scale tried that avoids underflow and overflow; None if there is none or time runs out."""
    for scale in (scale for scale in LOSS_SCALES if scale > repro.loss_scale):
        if time.monotonic() >= repro.deadline:
            return None
        narrow = gradients(inputs_of(replace(repro, loss_scale=scale)))
        if narrow is None:  # overflow: larger scales overflow too
            return None
        if not measure(narrow, wide, scale).real:
            return scale
    return None
