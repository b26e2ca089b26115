"""Devices for tests: the CPU, and a CUDA device if there is one."""

import pytest
import torch

from stabletrain.machine import hardware

CARD = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
"""A parameter that marks its test `gpu` and skips it if there is no CUDA device."""


def skip_unless_it_has(device: str, precision: str) -> None:
    """Skips the test if the device does not support the precision; a CPU can emulate bf16, but not TF32."""
    here = torch.device(device)
    if precision == "tf32" and not hardware.has_tf32(here):
        pytest.skip(f"{device} has no TF32")
    if precision.startswith("bf16") and device == "cuda" and not hardware.has_bf16(here):
        pytest.skip(f"{hardware.name(here)} has no bf16")
