"""fp16's loss scale: multiplies the loss before the backward pass, so that small gradients do not underflow.

    scale <- 2 scale after growth_interval applied steps in a row;   scale <- scale / 2 on overflow, down to min_scale

Source: Micikevicius et al., arXiv 1710.03740; the constants are those of `torch.amp.GradScaler`. GradScaler itself is
not used, because the guard's gate and the loss scale must agree about each overflow without a host read.
"""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.records import GradNorms, LossTerms
from stabletrain.stability.precision.autocast import Unscaled

LARGEST_SCALE = 2.0**100
"""Upper bound of the loss scale: an infinite scale could never be halved again."""


def check_scale(init_scale: float, growth_interval: int, min_scale: float) -> None:
    """Raises ConfigError if a key of the loss scale is out of bounds."""
    if not 0 < min_scale <= init_scale <= LARGEST_SCALE:
        raise ConfigError(
            f"precision.init_scale={init_scale:g} and precision.min_scale={min_scale:g} do not satisfy "
            f"0 < min_scale <= init_scale <= {LARGEST_SCALE:.3g}: 65536 and 1 are customary"
        )
    if growth_interval < 1:
        raise ConfigError(f"precision.growth_interval={growth_interval} is below 1: 2000 is customary")


@dataclass
class LossScaled(Unscaled):
    """fp16: autocast to float16 and a dynamic loss scale.

    Attributes:
        init_scale: initial loss scale.
        growth_interval: applied steps in a row after which the scale doubles.
        min_scale: floor of the scale; a non-finite gradient at the floor is a fault, not a routine overflow.
    """

    init_scale: float = 65536.0
    growth_interval: int = 2000
    min_scale: float = 1.0
    _scale: Tensor = field(init=False, repr=False)
    _clean: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale(self.init_scale, self.growth_interval, self.min_scale)
        self._reset()

    def _reset(self) -> None:
        self._scale = torch.tensor(float(self.init_scale), device=self.device)
        self._clean = torch.zeros((), dtype=torch.int64, device=self.device)

    def scale(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Returns the loss times the loss scale, in fp32."""
        return loss * self._scale

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divides every gradient by the loss scale, in place; exact if the scale is a power of two."""
        torch._foreach_div_(gradients, self._scale)

    def loss_scale(self) -> Float[Tensor, ""]:
        """Returns the loss scale of the current step."""
        return self._scale

    def overflow(self, terms: LossTerms, norms: GradNorms) -> Bool[Tensor, ""]:
        """Returns whether the loss is finite, the gradients are not, and the scale is above its floor."""
        # A loss that is not finite itself has another cause than the scale. One comparison tests both numbers.
        finite_loss, finite_norm = (torch.stack([terms.total, norms.total]).abs() < math.inf).unbind()
        return finite_loss & ~finite_norm & (self._scale > self.min_scale)

    def close(self, gate: Bool[Tensor, ""], overflow: Bool[Tensor, ""] | bool) -> Bool[Tensor, ""]:
        """Returns the gate, closed on overflow."""
        return gate & torch.logical_not(overflow)  # ty: ignore[invalid-argument-type]

    def update(self, overflow: Bool[Tensor, ""] | bool, applied: Bool[Tensor, ""] | bool) -> None:
        """Adjusts the scale after a step; a step skipped for another reason than overflow changes nothing."""
        if not isinstance(overflow, Tensor):  # a loop of the user's own knows it on the host
            overflow = torch.full_like(self._clean, overflow, dtype=torch.bool)
        # Both outcomes are computed and one is selected, so that the host need not read `overflow`.
        clean = self._clean + applied
        grow = clean >= self.growth_interval
        grown = torch.where(grow, (self._scale * 2.0).clamp(max=LARGEST_SCALE), self._scale)
        halved = (self._scale * 0.5).clamp(min=self.min_scale)
        self._scale = torch.where(overflow, halved, grown)
        self._clean = torch.where(overflow | grow, 0, clean)

    def state_dict(self) -> dict:
        """Returns the scale, and the count of applied steps towards its next doubling."""
        return {"scale": self._scale, "clean": self._clean}

    def load_state_dict(self, state: dict) -> None:
        """Restores the scale and its step count; resets both if `state` is of another precision (empty)."""
        if not state:
            self._reset()
        else:
            self._scale = state["scale"].to(self._scale)
            self._clean = state["clean"].to(self._clean)
