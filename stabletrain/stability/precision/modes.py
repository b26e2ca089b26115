"""The modes of the config group `precision`; each refuses hardware that lacks it.

fp32 and tf32 accept `fp32_modules` from a preset and note that it has no effect, so that `stability=v100
precision=fp32` works as the fp32 run to compare with.
"""

from collections.abc import Sequence

import torch

from stabletrain.errors import ConfigError, WrongCard
from stabletrain.machine import hardware
from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.stability.precision.bf16_weights import Bf16Parameters
from stabletrain.stability.precision.loss_scale import LossScaled, check_scale


def fp32(device: torch.device, fp32_modules: Sequence[str] = ()) -> Unscaled:
    """IEEE fp32 everywhere: the reference for diagnosis."""
    return Unscaled("fp32", device, torch.float32, fp32_modules=fp32_modules)


def tf32(device: torch.device, fp32_modules: Sequence[str] = ()) -> Unscaled:
    """fp32 storage; matmuls and convolutions with TF32's 10-bit mantissa.

    Raises:
        ConfigError: the device has no TF32; WrongCard if it is a card.
    """
    if not hardware.has_tf32(device):
        raise (WrongCard if device.type == "cuda" else ConfigError)(
            f"precision=tf32 on {hardware.name(device)}: TF32 exists on NVIDIA cards of compute capability 8.0 and "
            "newer; use precision=fp32 or precision=auto"
        )
    return Unscaled("tf32", device, torch.float32, tf32=True, fp32_modules=fp32_modules)


def bf16(device: torch.device, fp32_modules: Sequence[str] = ()) -> Unscaled:
    """bfloat16 autocast: fp32's range, 8 bits of precision, no loss scaling.

    Raises:
        WrongCard: the card has no bf16 and would silently emulate it (V100, T4 and older).
    """
    why = check_bf16("bf16", device)
    return Unscaled("bf16", device, torch.bfloat16, why=why, fp32_modules=fp32_modules)


def bf16_params(device: torch.device, fp32_modules: Sequence[str] = ()) -> Bf16Parameters:
    """bf16 autocast, with matrices and kernels stored in bf16 and their updates rounded stochastically.

    Raises:
        WrongCard: as for bf16.
    """
    why = check_bf16("bf16_params", device)
    return Bf16Parameters("bf16_params", device, torch.bfloat16, why=why, fp32_modules=fp32_modules)


def check_bf16(mode: str, device: torch.device) -> str:
    """Raises WrongCard if the card has no bf16; returns a note if the CPU has none, else an empty string."""
    if device.type == "cuda" and not hardware.has_bf16(device):
        raise WrongCard(
            f"precision={mode} on {hardware.name(device)}: this card has no bf16 and would emulate it many times "
            "slower; use precision=fp16 or precision=auto"
        )
    return "" if hardware.has_bf16(device) else "this CPU has no bf16 instructions: slower than fp32"


def fp16(
    device: torch.device,
    init_scale: float,
    growth_interval: int,
    min_scale: float,
    fp32_modules: Sequence[str] = (),
) -> LossScaled:
    """float16 autocast with dynamic loss scaling."""
    why = "fp16 on a CPU is for tests: some 60 times slower than fp32" if device.type == "cpu" else ""
    return LossScaled(
        "fp16",
        device,
        torch.float16,
        why=why,
        fp32_modules=fp32_modules,
        init_scale=init_scale,
        growth_interval=growth_interval,
        min_scale=min_scale,
    )


def auto(
    device: torch.device,
    init_scale: float,
    growth_interval: int,
    min_scale: float,
    fp32_modules: Sequence[str] = (),
    kept: str = "",
) -> Unscaled:
    """The fastest safe mode for the device: bf16 if the hardware has it, fp16 on older cards, else fp32.

    Args:
        device: the model's.
        init_scale, growth_interval, min_scale: used if it chooses fp16.
        fp32_modules: see `Unscaled`.
        kept: the mode that was chosen when the run began, if it is resumed: another one would change its numbers.

    Raises:
        ConfigError: a number is out of bounds, whatever it chooses: the same command must work on another card.
        WrongCard: the run began in bf16, and the card has none.
    """
    check_scale(init_scale, growth_interval, min_scale)
    fastest = "bf16" if hardware.has_bf16(device) else "fp16" if device.type == "cuda" else "fp32"
    mode, reason = kept or fastest, hardware.bf16_reason(device)
    if mode == "bf16" and fastest == "fp16":
        raise WrongCard(
            f"precision=auto chose bf16 when this run began, and {reason}: resume it on a card that has bf16, or type "
            "precision=fp16 to go on in that"
        )
    if mode == "fp16":
        chosen = fp16(device, init_scale, growth_interval, min_scale, fp32_modules)
    else:
        chosen = {"bf16": bf16, "fp32": fp32}[mode](device, fp32_modules)
    if mode != fastest:
        reason = f"kept from the start of the run, whose numbers {fastest} would change"
    chosen.why = "; ".join(filter(None, [f"auto: {reason}", chosen.why]))
    return chosen
