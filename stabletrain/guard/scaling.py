"""The loss scale of a user's loop: none, this project's own (`precision="fp16"`), or a `torch.amp.GradScaler`, which
`Guard` or the loop itself uses.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.records import GradNorms, LossTerms, Number
from stabletrain.stability.precision import modes
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.precision.loss_scale import LossScaled

FLOOR = 1.0
"""Loss scale at which a non-finite gradient is a fault, not a routine overflow."""

PRECISIONS = ("fp32", "bf16", "fp16")


class Scaling:
    """Autocast and loss scale by this project's `FullPrecision`.

    Attributes:
        name: of the number format; empty if the closure chooses it.
        autocasts: whether the guard runs closures under autocast.
    """

    autocasts = True

    def __init__(self, precision: FullPrecision, name: str = "") -> None:
        self.precision, self.name = precision, name

    def autocast(self) -> AbstractContextManager:
        """Returns the context in which closures run."""
        return self.precision.autocast()

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss to differentiate."""
        return self.precision.scale(loss)

    def unscale_(self, optimizer: Optimizer, found: list[Tensor]) -> None:
        """Divides the gradients by the loss scale, in place."""
        del optimizer
        self.precision.unscale_(found)

    def loss_scale(self) -> Number:
        """Returns the scale of the present step."""
        return self.precision.loss_scale()

    def overflow(self, terms: LossTerms, norms: GradNorms) -> Tensor | bool:
        """Returns whether the gradients overflowed as they routinely do; see `LossScaled.overflow`."""
        return self.precision.overflow(terms, norms)

    def close(self, gate: Tensor, overflow: Tensor | bool) -> Tensor:
        """Returns the gate, closed on overflow."""
        return gate & torch.logical_not(overflow) if isinstance(overflow, Tensor) else gate

    def update(self, optimizer: Optimizer, applied: bool, overflow: bool) -> None:
        """Runs the optimizer's step if it is applied, and adjusts the scale."""
        if applied:
            optimizer.step()
        if isinstance(self.precision, LossScaled):
            device = optimizer.param_groups[0]["params"][0].device
            self.precision.update(torch.full((), overflow, device=device), torch.full((), applied, device=device))

    def saved(self) -> dict:
        """Returns the scale before an update that may be undone."""
        return self.state_dict()

    def put_back(self, saved: dict | None) -> None:
        """Gives the scale the value that it had before an update that was undone."""
        if saved is not None:
            self.load_state_dict(saved)

    def unscaled_again(self, optimizer: Optimizer) -> None:
        """Notes that the gradients are unscaled already, for an update that is applied once more."""

    def state_dict(self) -> dict:
        """Returns the loss scale, for a checkpoint."""
        return getattr(self.precision, "state_dict", dict)()

    def load_state_dict(self, state: dict) -> None:
        """Restores it."""
        self.precision.load_state_dict(state)


class GivenScale(Scaling):
    """A loss scale that the loop brings along, with its own autocast."""

    autocasts = False

    def overflow(self, terms: LossTerms, norms: GradNorms) -> Tensor | bool:
        """Returns whether the loss is finite, the gradients are not, and the scale is above `FLOOR`; False without."""
        scale = self.loss_scale()
        if not isinstance(scale, Tensor):
            return False
        return torch.isfinite(terms.total) & ~torch.isfinite(norms.total) & (scale > FLOOR)


class TorchScaling(GivenScale):
    """The user's own `torch.amp.GradScaler`. Its state is the user's to save.

    Attributes:
        several_ranks: whether several ranks train together: each then adjusts its scaler by the verdict they share.
    """

    def __init__(self, scaler: GradScaler, device: torch.device, several_ranks: bool) -> None:
        super().__init__(modes.fp32(device), "fp16" if scaler.is_enabled() else "")
        self._scaler, self._several_ranks, self._one = scaler, several_ranks, torch.ones((), device=device)
        self._noted: dict | None = None  # the scaler's notes on the gradients, from before its last update

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scaler's scale."""
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Optimizer, found: list[Tensor]) -> None:
        """Divides the gradients by the scale, in place; the scaler notes whether they are finite."""
        del found
        self._scaler.unscale_(optimizer)

    def loss_scale(self) -> Number:
        """Returns the scaler's scale, on the device."""
        return self._scaler.scale(self._one) if self._scaler.is_enabled() else 1.0

    def update(self, optimizer: Optimizer, applied: bool, overflow: bool) -> None:
        """Runs the optimizer's step through the scaler if it is applied, and adjusts the scaler.

        A step withheld for another reason than an overflow leaves the scale as it is.
        """
        scaler = self._scaler
        if applied:
            self._noted = {**scaler._per_optimizer_states[id(optimizer)]} if scaler.is_enabled() else None
            scaler.step(optimizer)
            scaler.update()
        elif overflow and not self._several_ranks:
            scaler.update()
        else:  # given a scale, the scaler only forgets its notes on this step
            scaler.update(new_scale=scaler.get_scale() * (scaler.get_backoff_factor() if overflow else 1.0))

    def saved(self) -> dict:
        """Returns the scaler's state before an update that may be undone."""
        return self._scaler.state_dict()

    def put_back(self, saved: dict | None) -> None:
        """Gives the scaler the state that it had before an update that was undone."""
        if saved:
            self._scaler.load_state_dict(saved)

    def unscaled_again(self, optimizer: Optimizer) -> None:
        """Gives the scaler its notes back: it has dropped them with its own update, and would divide again."""
        if self._noted is not None:
            self._scaler._per_optimizer_states[id(optimizer)] = {**self._noted}

    def state_dict(self) -> dict:
        """Returns nothing: the scaler has a `state_dict` of its own."""
        return {}


class LoopScaling(GivenScale):
    """The loss scale of a loop that scales and unscales by itself.

    A fused optimizer may be given gradients that are still scaled, with `grad_scale` and `found_inf`.

    Args:
        precision, name: see `Scaling`.
        optimizer, scaler: where the scale is found.
    """

    def __init__(self, precision: FullPrecision, name: str, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        super().__init__(precision, name)
        self._optimizer, self._scaler = optimizer, scaler
        self._one = torch.ones((), device=optimizer.param_groups[0]["params"][0].device)

    def unscale_(self, optimizer: Optimizer, found: list[Tensor]) -> None:
        """Divides gradients that are still scaled, in place, so that the optimizer need not."""
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            torch._foreach_div_(found, scale)
            optimizer.grad_scale = None  # ty: ignore[missing-attribute]

    def loss_scale(self) -> Number:
        """Returns the loop's loss scale, without a host read."""
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            return scale.clone()
        return self._scaler.scale(self._one) if self._scaler is not None and self._scaler.is_enabled() else 1.0

    def update(self, optimizer: Optimizer, applied: bool, overflow: bool) -> None:
        """Does nothing: the loop runs the optimizer's step and updates its scaler."""


def scaling(
    precision: str | None, scaler: GradScaler | None, device: torch.device, *, several_ranks: bool = False
) -> Scaling:
    """Returns the scaling that `Guard`'s arguments ask for.

    Raises:
        ConfigError: `precision` is unknown, both are given, or the device lacks the precision.
    """
    if scaler is not None:
        if precision is not None:
            raise ConfigError(
                f"Guard(precision={precision!r}, scaler=...): with a GradScaler, the closure uses torch.autocast "
                "itself; leave precision out, or leave scaler out and let precision='fp16' scale the loss"
            )
        return TorchScaling(scaler, device, several_ranks)
    if precision not in (None, *PRECISIONS):
        raise ConfigError(f"Guard(precision={precision!r}) is not one of {', '.join(PRECISIONS)}, or None")
    if precision == "fp16":
        return Scaling(modes.fp16(device, init_scale=65536.0, growth_interval=2000, min_scale=FLOOR), precision)
    if precision == "bf16":
        return Scaling(modes.bf16(device), precision)
    return Scaling(modes.fp32(device), precision or "")
