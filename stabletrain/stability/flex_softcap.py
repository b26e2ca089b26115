"""Softcapped attention that stores no scores: PyTorch's FlexAttention, compiled for a card.

    softmax(mask(cap * tanh(q k^T / (sqrt(dim) cap)))) v      computed block by block, with the softmax in fp32

Only compiled code calls this: outside of it, FlexAttention (arXiv 2412.05496) stores the scores too. The backward pass
of its Triton kernel adds in a fixed order, without atomics, so a replayed step should have the same bits. No card has
shown this yet.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def attend(
    q: Float[Tensor, "batch head time dim"],
    k: Float[Tensor, "batch head time dim"],
    v: Float[Tensor, "batch head time dim"],
    cap: float,
) -> Float[Tensor, "batch head time dim"]:
    """Computes causal attention with capped scores, in the dtype of `q`; the scores are fp32."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # imports the compiler

    # Blocks above the diagonal are left out. The compiler merges these masks of all layers into one.
    blocks = create_block_mask(
        lambda batch, head, query, key: query >= key, None, None, q.shape[-2], k.shape[-2], device=q.device
    )
    return flex_attention(
        *(q, k, v),
        score_mod=lambda score, batch, head, query, key: cap * torch.tanh(score / cap),
        block_mask=blocks,
        # Named, because another backend adds in any order unless PyTorch is set to be deterministic.
        kernel_options={"BACKEND": "TRITON"},
    )
