"""Where a test runs: on the CPU, and, where there is one, on a CUDA device."""

import pytest
import torch

from stabletrain.machine import hardware

CARD = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
"""A parameter that marks its test `gpu`, and skips it where there is no card."""


def skip_unless_it_has(device: str, precision: str) -> None:
    """Skips a test of a precision that the device does not compute in; on a CPU bf16 can be emulated, TF32 cannot."""
    here = torch.device(device)
    if precision == "tf32" and not hardware.has_tf32(here):
        pytest.skip(f"{device} has no TF32")
    if precision.startswith("bf16") and device == "cuda" and not hardware.has_bf16(here):
        pytest.skip(f"{hardware.name(here)} has no bf16")
