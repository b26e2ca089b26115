"""Causal self-attention, with the places where QK-norm, softcap and QK-clip come in as objects handed to it.

    q, k, v = query(x), key(x), value(x);   q, k = position(norm(q)), position(norm(k))
    y = out(softmax(mask(q k^T / sqrt(dim))) v)                          per head

This file names no kind of any of them. Positions are RoPE's (arXiv 2104.09864) or learned; see `layers.py`.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stabletrain.models.layers import LearnedPosition, Rotary


@runtime_checkable
class QKNorm(Protocol):
    """Makes the module that normalises queries, or keys, over the head dimension; see `stability/qknorm.py`."""

    def __call__(self, head_dim: int) -> nn.Module: ...


@runtime_checkable
class Softcap(Protocol):
    """Computes attention and finishes the logits; see `stability/softcap.py`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, dropout_p: float) -> Tensor: ...
    def final(self, logits: Tensor) -> Tensor: ...


@runtime_checkable
class QKClip(Protocol):
    """Makes the module that is shown every query and key of training; see `stability/qkclip.py`."""

    def meter(self, n_head: int) -> nn.Module: ...


class KVCache:
    """Keys and values that one attention has computed so far, so that later tokens need not compute them again."""

    def __init__(self) -> None:
        self._past: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return 0 if self._past is None else self._past[0].shape[2]

    def extend(
        self, k: Float[Tensor, "batch head time dim"], v: Float[Tensor, "batch head time dim"]
    ) -> tuple[Float[Tensor, "batch head total dim"], Float[Tensor, "batch head total dim"]]:
        """Remembers new keys and values; returns all of them."""
        if self._past is not None:
            k, v = torch.cat([self._past[0], k], dim=2), torch.cat([self._past[1], v], dim=2)
        self._past = k, v
        return k, v


class DotProduct(nn.Module):
    """Softmax attention of queries over keys: a module of its own, so that it can be watched, and kept in fp32."""

    def __init__(self, softcap: Softcap, dropout: float) -> None:
        super().__init__()
        self.softcap = softcap
        self.dropout = dropout

    def forward(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch head key dim"],
        v: Float[Tensor, "batch head key dim"],
    ) -> Float[Tensor, "batch head query dim"]:
        """Each query sees the keys up to its own; the last query is aligned with the last key."""
        return self.softcap.attend(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)


class Attention(nn.Module):
    """Causal self-attention.

    Queries, keys and values have a projection each, not one fused, so that the norms of their weights and gradients can
    be told apart: attention logits grow through those of q and k.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        bias: bool,
        dropout: float,
        qknorm: QKNorm,
        softcap: Softcap,
        qkclip: QKClip,
    ) -> None:
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_embd, n_embd, bias=bias)
        self.key = nn.Linear(n_embd, n_embd, bias=bias)
        self.value = nn.Linear(n_embd, n_embd, bias=bias)
        self.query_norm = qknorm(n_embd // n_head)
        self.key_norm = qknorm(n_embd // n_head)
        self.meter = qkclip.meter(n_head)
        self.dot_product = DotProduct(softcap, dropout)
        self.out = nn.Linear(n_embd, n_embd, bias=bias)

    def forward(
        self, x: Float[Tensor, "batch time width"], position: Rotary | LearnedPosition, cache: KVCache | None
    ) -> Float[Tensor, "batch time width"]:
        """Attends to the tokens of `x` and to those in `cache`, which it extends."""
        start = 0 if cache is None else cache.length
        q, k, v = [
            projection(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        ]
        q = position.rotate(self.query_norm(q), start)
        k = position.rotate(self.key_norm(k), start)
        self.meter(q, k)
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.out(self.dot_product(q, k, v).transpose(1, 2).flatten(2))
