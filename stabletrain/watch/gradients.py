"""Norms of gradients and buffers, each measured once a step in one pass, before anything judges or clips them."""

from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.records import GradNorms


def gradients(model: nn.Module) -> list[Tensor]:
    """Every gradient there is, in the order of `model.parameters()`; of a sharded one this rank's part, in place."""
    found: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    return [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in found]


def measure(model: nn.Module) -> GradNorms:
    """L2 norms of the gradients as they lie, per parameter and over all; fp32, on their device, without a host read.

    A NaN or an Inf in any gradient makes the total non-finite, and so does a square sum past 3.4e38: a norm above
    1.8e19 is as unsafe as an infinite one. A model without gradients has norm 0. Of sharded gradients the norms are
    those of this rank's parts.
    """
    found = gradients(model)
    if not found:
        zero = torch.zeros(())
        return GradNorms(total=zero, each=zero[None])
    each = torch.stack(torch._foreach_norm(found, 2, dtype=torch.float32))
    return GradNorms(total=torch.linalg.vector_norm(each), each=each)


def buffer_norm(model: nn.Module) -> Tensor:
    """L2 norm over the floating-point buffers (BatchNorm's statistics); 0-d fp32, on their device, no host read.

    A buffer that is not finite makes it so. Weights as large as a flipped bit leaves them may hide behind a
    normalisation from loss and gradients, but not from its statistics.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return torch.zeros((), device=next(model.parameters()).device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(buffers, 2, dtype=torch.float32)))
