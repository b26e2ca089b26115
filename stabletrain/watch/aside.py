"""A pass aside: the model is run on a batch and nothing that the training step owns is written.

Buffers are copied for the pass (`torch.func.functional_call`), so BatchNorm's statistics stay; random generators are
put back; modules stay in training mode; a model compiled in place runs as plain Python, so that nothing is recompiled
and hooks are heard.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.machine.compiling import plainly
from stabletrain.machine.determinism import borrowed


@contextlib.contextmanager
def aside(model: nn.Module) -> Generator[None, None, None]:
    """Within it passes are plain Python and random numbers are borrowed: afterwards every generator is as before."""
    with borrowed(model), plainly():
        yield


def run(model: nn.Module, inputs: Any, parameters: dict[str, Tensor] | None = None) -> Tensor:
    """The model's logits, computed with copies of its buffers and, where given, with `parameters` for its own."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return torch.func.functional_call(model, buffers | (parameters or {}), (inputs,))
