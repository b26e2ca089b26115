"""Gradient norms, measured once a step in one pass, before anything judges or clips them."""

import torch
from torch import nn

from stabletrain.records import GradNorms


def measure(model: nn.Module) -> GradNorms:
    """L2 norms of the gradients as they lie, per parameter and over all; fp32, on their device, without a host read.

    A NaN or an Inf in any gradient makes the total non-finite, and so does a square sum past 3.4e38: a norm above
    1.8e19 is as unsafe as an infinite one. A model without gradients has norm 0.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        zero = torch.zeros(())
        return GradNorms(total=zero, each=zero[None])
    each = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
    return GradNorms(total=torch.linalg.vector_norm(each), each=each)
