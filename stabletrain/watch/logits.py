"""Output logits: log Z, the offset that softmax cannot see and that z-loss holds near 0.

    log Z_i = logsumexp(logits_i)

Source: PaLM, arXiv 2204.02311, section 5; its late drift, arXiv 2309.14322, section 3.2.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stabletrain.records import IGNORE_INDEX

VALUES = 2**24
"""Most logits widened to fp32 at once: 64 MiB."""


@torch.no_grad()
def log_z(
    logits: Float[Tensor, "*rows classes"], targets: Int[Tensor, "*rows"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean and maximum of log Z, in fp32, over the rows whose target counts; NaN and -inf where none does."""
    rows = logits.flatten(0, -2)
    parts = rows.split(max(1, VALUES // rows.shape[-1]))
    values = torch.cat([torch.logsumexp(part.float(), dim=-1) for part in parts])
    valid = (targets != IGNORE_INDEX).flatten()
    mean = torch.where(valid, values, 0.0).sum() / valid.sum()
    return mean, torch.where(valid, values, -torch.inf).amax()
