"""Full precision: what every mode of precision offers, and its form without autocast and without a loss scale."""

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.records import GradNorms, LossTerms, Number


class FullPrecision:
    """Computes in the dtype of the parameters. Base class of all modes, and what each must offer.

    Attributes:
        name: the mode.
        why: one line for the user, if the mode was chosen automatically or is slow on this device; else empty.
    """

    name: str
    why: str

    # ---- before the first step

    def prepare(self) -> None:
        """Sets the process-wide arithmetic of PyTorch's kernels. Does nothing."""

    def wrap_fp32_modules(self, model: nn.Module) -> list[str]:
        """Makes chosen modules compute in fp32, in place; returns their names: none.

        Called after the model is on its device and before it is compiled.
        """
        return []

    def casts(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Returns the dtype of each weight that is cast wherever the model uses it, by name: none.

        Called after `wrap_fp32_modules` and before the model is sharded, which gathers such weights in that dtype.
        """
        return {}

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Sets up the storage of the parameters. Does nothing: they stay as they are.

        Called after `wrap_fp32_modules` and after the optimizer is created, before anything is restored or compiled.
        """

    # ---- in a step, without synchronizing with the host

    def autocast(self) -> AbstractContextManager:
        """Returns the autocast context of the model's forward pass: one that does nothing."""
        return nullcontext()

    def scale(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Returns the loss to differentiate, times the loss scale: the loss itself."""
        return loss

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divides the gradients by the loss scale, in place. Does nothing."""

    def loss_scale(self) -> Number:
        """Returns the loss scale of the current step: 1."""
        return 1.0

    def overflow(self, terms: LossTerms, norms: GradNorms) -> Bool[Tensor, ""] | bool:
        """Returns whether non-finite gradients are routine, because the loss scale was too large: False.

        A format with fp32's range has no such overflow: a non-finite gradient is a fault.
        """
        return False

    def close(self, gate: Bool[Tensor, ""], overflow: Bool[Tensor, ""] | bool) -> Bool[Tensor, ""]:
        """Returns the gate of the update, closed on overflow: the gate itself."""
        return gate

    def update(self, overflow: Bool[Tensor, ""] | bool, applied: Bool[Tensor, ""] | bool) -> None:
        """Adjusts the loss scale after a step. Does nothing."""

    # ---- in a loop of the user's own, see `loop.py`

    def step(self, optimizer: Optimizer) -> None:
        """Runs the optimizer's step."""
        optimizer.step()

    def unscaled_again(self) -> None:
        """Notes that the gradients are unscaled already, before an update that was undone is applied again."""

    # ---- for checkpoints

    def state_dict(self) -> dict:
        """Returns the loss scale's state: nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Restores it; `state` may be of another mode. Does nothing."""
