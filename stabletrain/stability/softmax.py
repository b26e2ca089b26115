"""Attention sink: a learnt score for each head that takes part in the softmax and adds no value.

    softmax([scores, s])[..., :-1] v  =  sigmoid(logsumexp(scores) - s) * softmax(scores) v        s: one for each head

The weights of the keys then add up to less than 1, so a head can attend to nothing. Without it, heads that have nothing
to add put their weight on the first token, which grows large activations there. Source: gpt-oss (arXiv 2508.10925, and
`sdpa` in its `gpt_oss/torch/model.py`). With s = 0 it is the "softmax off by one".

A kind of softmax returns the parameter of an attention, or None. The softcap computes the attention: see `softcap.py`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

MORE = 8
"""Dimensions that the sink's key adds: fused kernels take multiples of 8."""

PARTS = 3
"""Half-precision numbers, 8 bits each or more, whose sum is an fp32 number of 24 bits."""


@dataclass(frozen=True)
class PlainSoftmax:
    """No sink. Base class of all kinds, and what each must offer."""

    def sink(self, n_head: int) -> nn.Parameter | None:
        """Returns the sink's scores in an attention of `n_head` heads: none."""
        return None


@dataclass(frozen=True)
class SinkSoftmax(PlainSoftmax):
    """A sink for each head."""

    def sink(self, n_head: int) -> nn.Parameter | None:
        """Returns a score of 0 for each head, in fp32; transformers draws gpt-oss's from N(0, 0.02)."""
        return nn.Parameter(torch.zeros(n_head))


def with_sink_key(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch head key dim"],
    v: Float[Tensor, "batch head key dim"],
    sink: Float[Tensor, " head"],
) -> tuple[
    Float[Tensor, "batch head queries more"],
    Float[Tensor, "batch head keys more"],
    Float[Tensor, "batch head keys more"],
]:
    """Returns queries, keys and values to which fused attention gives a sink: a first key with value 0.

    Queries are 1 in new dimensions, in which only the sink's key is not 0, so that its product with every query is
    `sink * sqrt(dim)`. As many queries as keys get a first query too, to stay aligned with the keys; drop its output.
    """
    dim, first = q.shape[-1], int(q.shape[-2] == k.shape[-2])
    # The sum of three numbers of half precision has the digits of the fp32 score.
    parts, rest = [], sink * dim**0.5
    for _ in range(PARTS):
        parts.append(rest.to(q.dtype))
        rest = rest - parts[-1]
    key = F.pad(torch.stack(parts, dim=-1), (dim, MORE - PARTS))[None, :, None]
    return (
        F.pad(q, (0, MORE, first, 0), value=1.0),
        torch.cat([key.expand(k.shape[0], -1, -1, -1), F.pad(k, (0, MORE))], dim=2),
        F.pad(v, (0, MORE, 1, 0)),
    )
