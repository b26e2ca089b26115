"""What people hook onto every module to find a NaN: each output looked at, and each gradient that comes back to it."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn


def check_finite(module: nn.Module, inputs: Any, output: Any) -> None:
    """One read of the device for each output."""
    if isinstance(output, Tensor) and not torch.isfinite(output).all():
        raise FloatingPointError(f"{type(module).__name__}: not finite")


def check_both(module: nn.Module, inputs: Any, output: Any) -> None:
    """The same, and one more read for the gradient of the loss with respect to the output."""
    check_finite(module, inputs, output)
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: check_finite(module, None, gradient))


@contextlib.contextmanager
def finite_hooks(model: nn.Module, *, backward: bool = False) -> Generator[None, None, None]:
    """Within it every module's output is looked at, and with `backward` every gradient of one too."""
    hook = check_both if backward else check_finite
    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
