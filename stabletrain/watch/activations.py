"""Activations: how large each block's values are, and how far from fp16's end.

    headroom = log2(65504 / absmax)    bits; below 0 the value does not fit into fp16

Source of the format's maximum: IEEE 754-2019, binary16.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FP16_MAX = 65504.0


class Heard(NamedTuple):
    """0-d fp32 tensors on their device, by block, in the order in which blocks finish.

    Attributes:
        rms: root mean square of the block's output.
        absmax: largest absolute value among the outputs of the block and of every module in it.
    """

    rms: dict[str, Tensor]
    absmax: dict[str, Tensor]


@contextmanager
def listening(blocks: dict[str, nn.Module]) -> Generator[Heard, None, None]:
    """Hears every forward pass within it; the hooks are gone afterwards, whatever happened.

    Yields:
        what was heard, filled during the pass. A block that is called more than once leaves its last RMS.
    """
    heard = Heard({}, {})
    handles = []

    def hear(name: str, whole: bool, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        values = first_tensor(output)
        if values is None:
            return
        largest = torch.stack(values.aminmax()).abs().amax().float()  # 25 times as fast as the norm, on a CPU
        seen = heard.absmax.get(name)
        heard.absmax[name] = largest if seen is None else torch.maximum(seen, largest)
        if whole:
            heard.rms.pop(name, None)
            heard.rms[name] = torch.linalg.vector_norm(values, dtype=torch.float32) / values.numel() ** 0.5

    try:
        for name, block in blocks.items():
            for module in block.modules():
                handles.append(module.register_forward_hook(partial(hear, name, module is block)))
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Tensor | None:
    """The first floating-point tensor with a value in it of what a module returned."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.numel() else None
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return next((found for part in output if (found := first_tensor(part)) is not None), None)
    return None


def headroom(absmax: float) -> float:
    """Bits left before fp16's end; -inf of an infinite value, NaN of NaN, inf of 0."""
    if absmax == 0.0:
        return math.inf
    return math.log2(FP16_MAX / absmax) if absmax != math.inf else -math.inf
