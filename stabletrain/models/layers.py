"""The layers of a GPT: attention, positions, norms, MLPs.

The layers a GPT chooses by name: where a token stands, how a width is normalised, what an MLP computes.

Each table, `POSITIONS`, `NORMS` and `MLPS`, maps the names of a config to classes with one signature, so that the model
has no branch on a kind.

Causal self-attention, with the places where QK-norm, softcap and QK-clip come in as objects handed to it.

    q, k, v = query(x), key(x), value(x);   q, k = position(norm(q)), position(norm(k))
    y = out(softmax(mask(q k^T / sqrt(dim))) v)                          per head

This file names no kind of any of them. Positions are RoPE's (arXiv 2104.09864) or learned; see `layers.py`.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError


class Rotary(nn.Module):
    """Rotary position embedding, arXiv 2104.09864: pair i of queries and keys is turned by position * 10000^(-2i/d).

    Dot products of queries and keys then depend on the distance of their positions alone. The tables and the rotation
    are fp32: in bf16 positions above 256 would collide.
    """

    def __init__(self, block_size: int, n_embd: int, head_dim: int) -> None:
        super().__init__()
        del n_embd
        if head_dim % 2:
            raise ConfigError(
                f"model.position=rope turns pairs of values, and the head dimension n_embd / n_head = {head_dim} is "
                "odd: choose model.n_head so that it is even, or model.position=learned"
            )
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.outer(torch.arange(block_size, dtype=torch.float64), frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Float[Tensor, "batch time width"], start: int) -> Float[Tensor, "batch time width"]:
        """The embeddings as they are; positions enter in `rotate`."""
        del start
        return x

    def rotate(self, x: Float[Tensor, "batch head time dim"], start: int) -> Float[Tensor, "batch head time dim"]:
        """Queries or keys of the positions from `start` on, turned; in their dtype."""
        here = slice(start, start + x.shape[2])
        cos, sin = self.get_buffer("cos")[here], self.get_buffer("sin")[here]
        a, b = x.chunk(2, dim=-1)  # times the fp32 tables they become fp32
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class LearnedPosition(nn.Module):
    """GPT-2's: a learned vector for each position, added to the embeddings."""

    def __init__(self, block_size: int, n_embd: int, head_dim: int) -> None:
        super().__init__()
        del head_dim
        self.embedding = nn.Embedding(block_size, n_embd)

    def forward(self, x: Float[Tensor, "batch time width"], start: int) -> Float[Tensor, "batch time width"]:
        """The embeddings plus the vectors of the positions from `start` on."""
        return x + self.embedding(torch.arange(start, start + x.shape[1], device=x.device))

    def rotate(self, x: Float[Tensor, "batch head time dim"], start: int) -> Float[Tensor, "batch head time dim"]:
        """Queries or keys as they are."""
        del start
        return x


class LayerNorm(nn.LayerNorm):
    """LayerNorm (arXiv 1607.06450) over the width, with a gain and, where the model has biases, a bias."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__(width, eps=eps, bias=bias)


class RMSNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467) over the width, with a gain; it never has a bias.

    Computed in fp32 and cast back, because autocast leaves `rms_norm` in whatever dtype it meets.
    """

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        del bias
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """`x` normalised, in the dtype of `x`."""
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(x.dtype)


class GELUMLP(nn.Module):
    """`down(gelu(up(x)))`, four times as wide inside."""

    def __init__(self, n_embd: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=bias)

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        return self.down(F.gelu(self.up(x)))


class SwiGLUMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, arXiv 2002.05202: 8/3 of the width inside, rounded up to a multiple of 64.

    So it has the parameters of a GELU MLP, to within the rounding.
    """

    def __init__(self, n_embd: int, bias: bool) -> None:
        super().__init__()
        hidden = 64 * -(-n_embd // 24)  # ceil(8/3 n_embd / 64) in whole numbers
        self.gate = nn.Linear(n_embd, hidden, bias=bias)
        self.up = nn.Linear(n_embd, hidden, bias=bias)
        self.down = nn.Linear(hidden, n_embd, bias=bias)

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))


POSITIONS = {"rope": Rotary, "learned": LearnedPosition}
NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
MLPS = {"gelu": GELUMLP, "swiglu": SwiGLUMLP}


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
