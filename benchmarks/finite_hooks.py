"""The usual hooks for finding a NaN: check each module's output, and the gradient of each output."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn


def check_finite(module: nn.Module, inputs: Any, output: Any) -> None:
    """Raises FloatingPointError if the output is not finite; synchronizes with the device for each output."""
    if isinstance(output, Tensor) and not torch.isfinite(output).all():
        raise FloatingPointError(f"{type(module).__name__}: not finite")


def check_both(module: nn.Module, inputs: Any, output: Any) -> None:
    """As `check_finite`, and checks the gradient of the loss with respect to the output too."""
    check_finite(module, inputs, output)
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: check_finite(module, None, gradient))


@contextlib.contextmanager
def finite_hooks(model: nn.Module, *, backward: bool = False) -> Generator[None, None, None]:
    """Context that checks every module's output, and with `backward` the gradient of every output."""
    hook = check_both if backward else check_finite
    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
