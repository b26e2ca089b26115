"""Softcap: squashes logits smoothly into (-cap, cap).

    softcap(x) = cap * tanh(x / cap)

Source: Gemma 2, arXiv 2408.00118, section 2; the cap on the final logits is from arXiv 1611.09940.

A kind of softcap computes attention, because the cap is applied between the dot product and the mask, and it caps the
final logits. There may be fewer queries than keys, as with a KV cache. The queries are then the last positions, so the
causal mask is aligned to the end.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.stability import flex_softcap
from stabletrain.stability.softmax import with_sink_key

Queries = Float[Tensor, "batch head query dim"]
"""Queries and outputs of attention."""

Keys = Float[Tensor, "batch head key dim"]
"""Keys and values of attention."""

Sink = Float[Tensor, " head"]
"""The sink's score of each head, see `softmax.py`."""


def softcap(x: Float[Tensor, "*shape"], cap: float) -> Float[Tensor, "*shape"]:
    """Returns `cap * tanh(x / cap)` in fp32; fp64 stays fp64."""
    # In bf16, tanh rounds to 1 above about 3 caps, and its slope `1 - tanh^2` would be 0.
    wide = x if x.dtype == torch.float64 else x.float()
    return cap * torch.tanh(wide / cap)


def causal_mask(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "{queries} {keys}"]:
    """Returns a mask that is True where a query may attend to a key; the last query attends to every key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=keys - queries)


def fused(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch head key dim"],
    v: Float[Tensor, "batch head key dim"],
    *,
    is_causal: bool,
    dropout_p: float,
    scale: float | None = None,
) -> Float[Tensor, "batch head query dim"]:
    """Returns PyTorch's fused attention, with a causal mask that is aligned to the last key."""
    queries, keys = q.shape[-2], k.shape[-2]
    if not is_causal or queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
    # PyTorch's `is_causal` aligns the mask to the first key, not to the last.
    mask = causal_mask(queries, keys, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)


@dataclass(frozen=True)
class NoSoftcap:
    """PyTorch's fused attention, and unchanged final logits. Base class of all kinds, and what each must offer."""

    def attend(
        self, q: Queries, k: Keys, v: Keys, *, is_causal: bool, dropout_p: float, sink: Sink | None = None
    ) -> Queries:
        """Returns `softmax(q k^T / sqrt(dim)) v`, in the dtype of `v`; a sink takes part in the softmax only."""
        if sink is None or q.is_meta:  # FLOPs are counted there, and the added dimensions are not the model's
            return fused(q, k, v, is_causal=is_causal, dropout_p=dropout_p)
        own_scale = q.shape[-1] ** -0.5  # not that of the dimensions that the sink adds
        y = fused(*with_sink_key(q, k, v, sink), is_causal=is_causal, dropout_p=dropout_p, scale=own_scale)
        return y[..., -q.shape[-2] :, : v.shape[-1]]

    def final(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Returns the logits unchanged."""
        return logits

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError if this kind cannot run on a device."""


@dataclass(frozen=True)
class Gemma2Softcap(NoSoftcap):
    """Softcap of the attention logits and of the final logits.

    Attributes:
        attention_cap: cap of the attention logits, 50 in Gemma 2.
        final_cap: cap of the final logits, 30 in Gemma 2.
        attention: `math` stores the scores, `[batch, head, query, key]`, which fused attention avoids: expect a slower
            step. `flex` fuses them in compiled steps on a card, see `flex_softcap.py`; all other passes use `math`.
    """

    attention_cap: float
    final_cap: float
    attention: str = "math"

    def __post_init__(self) -> None:
        for name in ("attention_cap", "final_cap"):
            if not 0 < (cap := getattr(self, name)) < float("inf"):
                raise ConfigError(
                    f"softcap.{name}={cap} is not a finite number above 0: use softcap=none for no softcap"
                )
        if self.attention not in ("math", "flex"):
            raise ConfigError(f"softcap.attention={self.attention} is unknown: choose math or flex")

    def attend(
        self, q: Queries, k: Keys, v: Keys, *, is_causal: bool, dropout_p: float, sink: Sink | None = None
    ) -> Queries:
        """Returns `softmax(softcap(q k^T / sqrt(dim))) v`, in the dtype of `v`, with the softmax in fp32.

        A sink takes part in the softmax only, and is not capped.
        """
        training = is_causal and q.shape[-2] == k.shape[-2] and dropout_p == 0 and sink is None
        if self.attention == "flex" and training and in_code_for_a_card(q):
            return flex_softcap.attend(q, k, v, self.attention_cap)
        # Scale the queries before the product, as fused attention does: in fp16 an unscaled product may overflow.
        scores = softcap((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), self.attention_cap)
        if is_causal:  # mask after the cap, because the cap would turn -inf into a finite score
            scores = scores.masked_fill(~causal_mask(q.shape[-2], k.shape[-2], q.device), -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : k.shape[-2]].to(v.dtype)
        return F.dropout(weights, dropout_p) @ v

    def final(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Returns the capped logits, in their dtype."""
        return softcap(logits, self.final_cap).to(logits.dtype)

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError if attention is to be fused and the device is no card."""
        if self.attention == "flex" and device.type != "cuda":
            raise ConfigError(
                "softcap.attention=flex needs a card, because FlexAttention has no backward pass elsewhere, and this "
                f"run's device is {device}; fix: softcap.attention=math"
            )


def in_code_for_a_card(q: Tensor) -> bool:
    """Returns whether code is being compiled that will run on a card."""
    return torch.compiler.is_compiling() and q.device.type == "cuda"
