"""Devices for tests: the CPU, and a CUDA device if there is one."""

from importlib.util import find_spec

import pytest
import torch

from stabletrain.machine import hardware

CARD = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
"""A parameter that marks its test `gpu` and skips it if there is no CUDA device."""


def need_torchao(precision: str = "fp8") -> None:
    """Skips the test of fp8 if torchao is not installed."""
    if precision == "fp8" and find_spec("torchao") is None:
        pytest.skip('needs torchao: pip install -e ".[fp8]"')


def skip_unless_it_has(device: str, precision: str, model: str = "gpt") -> None:
    """Skips the test if device or model do not support the precision; a CPU can emulate bf16 and fp8, but not TF32."""
    need_torchao(precision)
    if (precision, model) == ("fp8", "resnet"):
        pytest.skip("a ResNet has no linear layer for fp8")
    here = torch.device(device)
    if precision == "tf32" and not hardware.has_tf32(here):
        pytest.skip(f"{device} has no TF32")
    if precision.startswith(("bf16", "fp8")) and device == "cuda" and not hardware.has_bf16(here):
        pytest.skip(f"{hardware.name(here)} has no bf16")
