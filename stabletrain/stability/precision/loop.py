"""The precision of a loop of the user's own: a mode of this project, or the loop's own autocast and loss scale.

The loop's own loss scale is that of a `torch.amp.GradScaler`, which `Guard` or the loop itself uses.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.records import GradNorms, LossTerms, Number
from stabletrain.stability.precision import modes
from stabletrain.stability.precision.autocast import Unscaled

FLOOR = 1.0
"""Loss scale at which a non-finite gradient is a fault, not a routine overflow."""

PRECISIONS = ("fp32", "bf16", "fp16")


class GivenScale(Unscaled):
    """A loop that enters autocast by itself, and that may have a `GradScaler`.

    Args:
        device: of the gradients.
        optimizer: the one whose gradients are scaled.
        scaler: its scale is the loss scale; None for none. Its state is the user's to save.
    """

    def __init__(self, device: torch.device, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        self._scaler = GradScaler(device.type, enabled=False) if scaler is None else scaler
        super().__init__("fp16" if self._scaler.is_enabled() else "", device, torch.float32)
        self._optimizer, self._one = optimizer, torch.ones((), device=device)

    def loss_scale(self) -> Number:
        """Returns the scaler's scale, on the device, without a host read; 1 if there is none."""
        return self._scaler.scale(self._one) if self._scaler.is_enabled() else 1.0

    def overflow(self, terms: LossTerms, norms: GradNorms) -> Bool[Tensor, ""] | bool:
        """Returns whether the loss is finite, the gradients are not, and the scale is above `FLOOR`; False without."""
        scale = self.loss_scale()
        if not isinstance(scale, Tensor):
            return False
        return torch.isfinite(terms.total) & ~torch.isfinite(norms.total) & (scale > FLOOR)

    def close(self, gate: Bool[Tensor, ""], overflow: Bool[Tensor, ""] | bool) -> Bool[Tensor, ""]:
        """Returns the gate, closed on overflow."""
        return gate & torch.logical_not(overflow) if isinstance(overflow, Tensor) else gate


class GradScaled(GivenScale):
    """`Guard` scales, unscales and steps with the loop's `GradScaler`.

    Args:
        several_ranks: whether several ranks train together: each then adjusts its scaler by the verdict they share.
    """

    def __init__(
        self, device: torch.device, optimizer: Optimizer, scaler: GradScaler, several_ranks: bool = False
    ) -> None:
        super().__init__(device, optimizer, scaler)
        self._several_ranks = several_ranks
        self._noted: dict[str, Any] | None = None  # the scaler's notes on the gradients, from before its last step

    def scale(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Returns the loss times the scaler's scale."""
        return self._scaler.scale(loss)

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divides the optimizer's gradients by the scale, in place; the scaler notes whether they are finite."""
        self._scaler.unscale_(self._optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Runs the optimizer's step through the scaler."""
        if self._scaler.is_enabled():
            self._noted = {**self._scaler._per_optimizer_states[id(optimizer)]}
        self._scaler.step(optimizer)

    def update(self, overflow: Bool[Tensor, ""] | bool, applied: Bool[Tensor, ""] | bool) -> None:
        """Adjusts the scaler after a step; one skipped for another reason than overflow leaves the scale as it is."""
        scaler = self._scaler
        if applied or (overflow and not self._several_ranks):
            scaler.update()
        else:  # given a scale, the scaler only forgets its notes on this step
            scaler.update(new_scale=scaler.get_scale() * (scaler.get_backoff_factor() if overflow else 1.0))

    def unscaled_again(self) -> None:
        """Gives the scaler its notes back: it has dropped them in `update`, and would divide again."""
        if self._noted is not None:
            self._scaler._per_optimizer_states[id(self._optimizer)] = {**self._noted}


class LoopScaled(GivenScale):
    """The loop scales, unscales and steps by itself.

    A fused optimizer may be given gradients that are still scaled, with `grad_scale` and `found_inf`.
    """

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divides gradients that are still scaled, in place, so that the optimizer need not."""
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            torch._foreach_div_(gradients, scale)
            self._optimizer.grad_scale = None  # ty: ignore[missing-attribute]

    def loss_scale(self) -> Number:
        """Returns the scale of the gradients that the optimizer was given, or the scaler's; without a host read."""
        scale = getattr(self._optimizer, "grad_scale", None)
        return super().loss_scale() if scale is None else scale.clone()


def precision_of_loop(name: str | None, device: torch.device) -> Unscaled:
    """Returns the mode that `Guard(precision=name)` asks for. Without a name, closures may enter autocast themselves.

    Raises:
        ConfigError: the name is unknown, or the device lacks the precision.
    """
    match name:
        case None:
            return Unscaled("", device, torch.float32)
        case "fp32":
            return modes.fp32(device)
        case "bf16":
            return modes.bf16(device)
        case "fp16":
            return modes.fp16(device, init_scale=65536.0, growth_interval=2000, min_scale=FLOOR)
    raise ConfigError(f"Guard(precision={name!r}) is not one of {', '.join(PRECISIONS)}, or None")
