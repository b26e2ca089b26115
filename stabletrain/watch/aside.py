"""A pass aside: the model is run on a batch and nothing that the training step owns is written.

Buffers are copied for the pass (`torch.func.functional_call`), so BatchNorm's statistics stay; random generators are
put back; modules stay in training mode; a model compiled in place runs as plain Python, so that nothing is recompiled
and hooks are heard.
"""

import contextlib
import random
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def aside(model: nn.Module) -> Generator[None, None, None]:
    """Within it passes are plain Python and random numbers are borrowed: afterwards every generator is as before.

    PyTorch's generators of the CPU and of the model's cards, NumPy's and Python's.
    """
    cards = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    drawn, numpy_drawn = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=cards), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            random.setstate(drawn)
            np.random.set_state(numpy_drawn)


def run(model: nn.Module, inputs: Any, parameters: dict[str, Tensor] | None = None) -> Tensor:
    """The model's logits, computed with copies of its buffers and, where given, with `parameters` for its own."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return torch.func.functional_call(model, buffers | (parameters or {}), (inputs,))
