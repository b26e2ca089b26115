"""Precision: in which format the forward and backward pass compute, and what fp16 needs so as to survive it.

Parameters, gradients and optimizer state are fp32 in every mode; only autocast's list of operations runs lower. TF32 is
set explicitly in every mode, for matmul and for convolution, since PyTorch's defaults differ between the two.

| mode | autocast | TF32 | loss scaling |
|---|---|---|---|
| fp32 | - | off | - |
| tf32 | - | on | - |
| bf16 | bfloat16 | off | - (fp32's range) |
| fp16 | float16 | off | dynamic |
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.records import GradNorms, LossTerms


def set_tf32(allowed: bool) -> None:
    """Sets TF32 for every fp32 matmul and convolution of the process, on CUDA and in oneDNN: "tf32" or "ieee"."""
    from torch.backends import cuda, cudnn, mkldnn

    on_card: list[Any] = [cuda.matmul, cudnn.conv, cudnn.rnn]  # ty: ignore[missing-attribute]
    for operation in on_card:
        operation.fp32_precision = "tf32" if allowed else "ieee"
    in_onednn: list[Any] = [mkldnn.matmul, mkldnn.conv, mkldnn.rnn]  # ty: ignore[missing-attribute]
    for operation in in_onednn:
        operation.fp32_precision = "ieee"  # what oneDNN calls tf32 is not the cards' format


@dataclass
class Unscaled:
    """Every mode but fp16: the loss is differentiated as it is.

    Attributes:
        name: the mode.
        device: where the model lives.
        dtype: what autocast computes in; float32 means no autocast.
        tf32: whether fp32 matmuls and convolutions may round to TF32.
        why: one line for people, where the mode was chosen for them or is slow here.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    tf32: bool = False
    why: str = ""

    def prepare(self) -> None:
        """Sets the process's TF32 flags; call before the first step."""
        set_tf32(self.tf32)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context of forward pass and nothing else."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def scale(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The loss itself."""
        return loss

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Gradients stay as they are."""
        del gradients

    def loss_scale(self) -> Float[Tensor, ""]:
        """1."""
        return torch.ones((), device=self.device)

    def overflow(self, terms: LossTerms, norms: GradNorms) -> Bool[Tensor, ""]:
        """Never: these formats have fp32's range, so a non-finite gradient is no routine."""
        del terms
        return torch.zeros_like(norms.total, dtype=torch.bool)

    def update(self, overflow: Bool[Tensor, ""], applied: Bool[Tensor, ""]) -> None:
        """Nothing to calibrate."""
        del overflow, applied

    def state_dict(self) -> dict:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Nothing."""
        del state


@dataclass
class LossScaled(Unscaled):
    """fp16: the loss is multiplied before the backward pass, so that small gradients survive the format.

    The scale doubles after `growth_interval` applied steps in a row and halves on overflow, down to `min_scale`
    (Micikevicius et al., arXiv 1710.03740; the numbers are `torch.amp.GradScaler`'s). The rule is written out here, and
    not taken from GradScaler, because the guard's gate and the scale must agree on the device about one overflow.

    Attributes:
        init_scale: loss scale at the start.
        growth_interval: applied steps in a row before it doubles.
        min_scale: floor; an overflow at the floor is a fault, not calibration.
    """

    init_scale: float = 65536.0
    growth_interval: int = 2000
    min_scale: float = 1.0
    _scale: Tensor = field(init=False, repr=False)
    _clean: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.init_scale:
            raise ConfigError(
                f"precision.init_scale={self.init_scale:g} and precision.min_scale={self.min_scale:g} do not satisfy "
                "0 < min_scale <= init_scale: 65536 and 1 are customary"
            )
        if self.growth_interval < 1:
            raise ConfigError(f"precision.growth_interval={self.growth_interval} is below 1: 2000 is customary")
        self._scale = torch.tensor(self.init_scale, device=self.device)
        self._clean = torch.zeros((), dtype=torch.int64, device=self.device)

    def scale(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The loss times the loss scale, in fp32."""
        return loss * self._scale

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divides every gradient by the loss scale, in place (the scale is a power of two: exact)."""
        torch._foreach_div_(gradients, self._scale)

    def loss_scale(self) -> Float[Tensor, ""]:
        """The scale of the current step."""
        return self._scale

    def overflow(self, terms: LossTerms, norms: GradNorms) -> Bool[Tensor, ""]:
        """Loss finite, gradients not, and the scale can still fall: withhold the update, and calibrate."""
        finite_loss, finite_norm = torch.isfinite(terms.total), torch.isfinite(norms.total)
        return finite_loss & ~finite_norm & (self._scale > self.min_scale)

    def update(self, overflow: Bool[Tensor, ""], applied: Bool[Tensor, ""]) -> None:
        """Calibrates the scale after a step; a step withheld for another reason than overflow changes nothing."""
        clean = self._clean + applied
        grow = clean >= self.growth_interval
        grown = torch.where(grow, self._scale * 2.0, self._scale)
        halved = (self._scale * 0.5).clamp(min=self.min_scale)
        self._scale = torch.where(overflow, halved, grown)
        self._clean = torch.where(overflow | grow, 0, clean)

    def state_dict(self) -> dict:
        """Scale and clean steps, for the checkpoint."""
        return {"scale": self._scale, "clean": self._clean}

    def load_state_dict(self, state: dict) -> None:
        """Scale and clean steps, from a checkpoint (one of another precision has none: they start afresh)."""
        if state:
            self._scale = state["scale"].to(self._scale)
            self._clean = state["clean"].to(self._clean)


def fp32(device: torch.device) -> Unscaled:
    """True IEEE fp32 everywhere: the diagnostic fallback."""
    return Unscaled("fp32", device, torch.float32)


def tf32(device: torch.device) -> Unscaled:
    """fp32 storage, matmuls and convolutions with TF32's 10-bit mantissa.

    Raises:
        ConfigError: the device has no TF32.
    """
    if not hardware.has_tf32(device):
        raise ConfigError(
            f"precision=tf32 on {hardware.name(device)}: TF32 exists on NVIDIA cards of compute capability 8.0 and "
            "newer; use precision=fp32 or precision=auto"
        )
    return Unscaled("tf32", device, torch.float32, tf32=True)


def bf16(device: torch.device) -> Unscaled:
    """bfloat16 autocast: fp32's range, 8 bits of precision, no loss scaling.

    Raises:
        ConfigError: the card only emulates bf16, slowly and without an error of its own (V100, T4 and older).
    """
    if device.type == "cuda" and not hardware.has_bf16(device):
        raise ConfigError(
            f"precision=bf16 on {hardware.name(device)}: this card has no bf16 and would emulate it many times slower; "
            "use precision=fp16 or precision=auto"
        )
    why = "" if hardware.has_bf16(device) else "this CPU has no bf16 instructions: slower than fp32"
    return Unscaled("bf16", device, torch.bfloat16, why=why)


def fp16(device: torch.device, init_scale: float, growth_interval: int, min_scale: float) -> LossScaled:
    """float16 autocast with dynamic loss scaling."""
    why = "fp16 on a CPU is for tests: some 60 times slower than fp32" if device.type == "cpu" else ""
    return LossScaled(
        "fp16",
        device,
        torch.float16,
        why=why,
        init_scale=init_scale,
        growth_interval=growth_interval,
        min_scale=min_scale,
    )


def auto(device: torch.device, init_scale: float, growth_interval: int, min_scale: float) -> Unscaled:
    """The fastest mode that is safe here: bf16 where the hardware has it, fp16 on older cards, else fp32.

    The three numbers are fp16's, for the cards that end there.
    """
    if hardware.has_bf16(device):
        chosen = bf16(device)
    elif device.type == "cuda":
        chosen = fp16(device, init_scale, growth_interval, min_scale)
    else:
        chosen = fp32(device)
    chosen.why = f"auto: {hardware.bf16_reason(device)}"
    return chosen
