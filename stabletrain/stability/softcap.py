"""Softcap: logits are squashed smoothly into (-cap, cap), so that no score can run away.

    softcap(x) = cap * tanh(x / cap)

Source: Gemma 2, arXiv 2408.00118, section 2; the final cap is from arXiv 1611.09940.

A kind of softcap computes attention, because the cap stands between the dot product and the mask, and caps the final
logits. Queries may be fewer than the keys, as with a cache: they are the last ones, so the causal mask is aligned to
the end.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from stabletrain.errors import ConfigError


def softcap(x: Float[Tensor, "*shape"], cap: float) -> Float[Tensor, "*shape"]:
    """`cap * tanh(x / cap)` in fp32, or fp64 where `x` is.

    In bf16 tanh rounds to 1 from about 3 caps on, and its slope `1 - tanh^2` would be 0.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return cap * torch.tanh(wide / cap)


def causal_mask(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "{queries} {keys}"]:
    """True where a query may see a key; the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=keys - queries)


@dataclass(frozen=True)
class NoSoftcap:
    """PyTorch's fused attention, and final logits as they are."""

    def attend(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch head key dim"],
        v: Float[Tensor, "batch head key dim"],
        *,
        is_causal: bool,
        dropout_p: float,
    ) -> Float[Tensor, "batch head query dim"]:
        """`softmax(q k^T / sqrt(dim)) v`, in the dtype of `v`."""
        queries, keys = q.shape[-2], k.shape[-2]
        if not is_causal or queries == keys:
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, dropout_p=dropout_p)
        # PyTorch's own `is_causal` would align the mask to the first key.
        mask = causal_mask(queries, keys, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)

    def final(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The same logits."""
        return logits


@dataclass(frozen=True)
class Gemma2Softcap:
    """Softcap of the attention logits and of the final logits.

    The scores are held in memory, `[batch, head, query, key]`, which fused attention avoids: expect a slower step.

    Attributes:
        attention_cap: cap of the attention logits, 50 in Gemma 2.
        final_cap: cap of the final logits, 30 in Gemma 2.
    """

    attention_cap: float
    final_cap: float

    def __post_init__(self) -> None:
        for name in ("attention_cap", "final_cap"):
            if not 0 < (cap := getattr(self, name)) < float("inf"):
                raise ConfigError(
                    f"softcap.{name}={cap} is not a finite number above 0: use softcap=none for no softcap"
                )

    def attend(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch head key dim"],
        v: Float[Tensor, "batch head key dim"],
        *,
        is_causal: bool,
        dropout_p: float,
    ) -> Float[Tensor, "batch head query dim"]:
        """`softmax(softcap(q k^T / sqrt(dim))) v`, in the dtype of `v`; the softmax in fp32."""
        scores = softcap((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), self.attention_cap)
        if is_causal:  # after the cap, which would turn -inf into a finite score
            scores = scores.masked_fill(~causal_mask(q.shape[-2], k.shape[-2], q.device), -torch.inf)
        weights = torch.softmax(scores, dim=-1).to(v.dtype)
        return F.dropout(weights, dropout_p) @ v

    def final(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The capped logits, in their dtype."""
        return softcap(logits, self.final_cap).to(logits.dtype)
