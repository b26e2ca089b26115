"""The layers of a GPT: positions, norms, MLPs and causal self-attention.

    q, k, v = query(x), key(x), value(x);   q, k = position(norm(q)), position(norm(k))
    y = out(softmax(mask(q k^T / sqrt(dim))) v)                          per head

`POSITIONS`, `NORMS` and `MLPS` map the names in a config to classes that share one signature. QK-norm, softcap,
QK-clip, softmax and gate are objects passed to the attention.
"""

from inspect import signature

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.stability.attention_gate import NoAttentionGate
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.softcap import NoSoftcap
from stabletrain.stability.softmax import PlainSoftmax


class Rotary(nn.Module):
    """Rotary position embedding, arXiv 2104.09864: rotates pair i of queries and keys by position * 10000^(-2i/d).

    Dot products of queries and keys then depend only on the distance of their positions.
    """

    constant_buffers = ("cos", "sin")

    def __init__(self, block_size: int, n_embd: int, head_dim: int) -> None:
        super().__init__()
        del n_embd
        if head_dim % 2:
            raise ConfigError(
                f"model.position=rope rotates pairs of values, but the head dimension n_embd / n_head = {head_dim} is "
                "odd: choose model.n_head so that it is even, or use model.position=learned"
            )
        # The tables and the rotation are fp32: in bf16, positions above 256 would collide.
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.outer(torch.arange(block_size, dtype=torch.float64), frequency)
        # Value i turns with value i + d/2: (a, b) -> (a cos - b sin, b cos + a sin).
        cos, sin = angle.cos().float(), angle.sin().float()
        self.register_buffer("cos", torch.cat([cos, cos], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], dim=-1), persistent=False)

    def forward(self, x: Float[Tensor, "batch time width"], start: int) -> Float[Tensor, "batch time width"]:
        """Returns the embeddings unchanged; `rotate` applies the positions."""
        return x

    def rotate(self, x: Float[Tensor, "batch time head dim"], start: int) -> Float[Tensor, "batch time head dim"]:
        """Returns queries or keys rotated by their positions, which begin at `start`; keeps their dtype."""
        here = slice(start, start + x.shape[1])
        cos, sin = (self.get_buffer(name)[here].unsqueeze(1) for name in ("cos", "sin"))  # the same for every head
        wide = x if x.dtype == torch.float64 else x.float()
        partner = wide.roll(x.shape[-1] // 2, dims=-1)
        # In place, because passes over new memory are most of the time on a CPU.
        return (wide * cos).add_(partner.mul_(sin)).to(x.dtype)


class LearnedPosition(nn.Module):
    """GPT-2's learned position embedding: one vector per position, added to the token embeddings."""

    def __init__(self, block_size: int, n_embd: int, head_dim: int) -> None:
        super().__init__()
        del head_dim
        self.embedding = nn.Embedding(block_size, n_embd)

    def forward(self, x: Float[Tensor, "batch time width"], start: int) -> Float[Tensor, "batch time width"]:
        """Adds the vectors of the positions, which begin at `start`."""
        return x + self.embedding(torch.arange(start, start + x.shape[1], device=x.device))

    def rotate(self, x: Float[Tensor, "batch time head dim"], start: int) -> Float[Tensor, "batch time head dim"]:
        """Returns queries or keys unchanged."""
        return x


class LayerNorm(nn.LayerNorm):
    """LayerNorm (arXiv 1607.06450) over the width, with a gain and an optional bias."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__(width, eps=eps, bias=bias)


class RMSNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467) over the width, in fp32, with a gain and no bias; `bias` is ignored."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        del bias
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Returns `x` normalised, in the dtype of `x`."""
        # Autocast does not upcast `rms_norm`: it runs in the dtype of its input.
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(x.dtype)


class GELUMLP(nn.Module):
    """`down(gelu(up(x)))`, with a hidden width of 4 `n_embd`."""

    def __init__(self, n_embd: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=bias)

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        return self.down(F.gelu(self.up(x)))


class TanhGELUMLP(GELUMLP):
    """A GELU MLP with the tanh approximation of the GELU (arXiv 1606.08415, section 2), as in GPT-2."""

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLUMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, arXiv 2002.05202, with a hidden width of 8/3 `n_embd`, a multiple of 64.

    It has as many parameters as a GELU MLP, up to rounding. For large inputs it grows like their square. With a
    `limit`, `gate(x)` is at most that, and `up(x)` within plus or minus that; a value beyond it has a gradient of 0.
    DeepSeek-V4 has a limit of 10, against loss spikes, and gpt-oss one of 7. Two other changes of gpt-oss are no part
    of the limit: `sigmoid(1.702 gate)` and `up + 1`. `silu` is above -0.28, so the gate needs no lower limit.
    """

    def __init__(self, n_embd: int, bias: bool, limit: float | None = None) -> None:
        super().__init__()
        self.limit = limit
        hidden = 64 * -(-n_embd // 24)  # 64 ceil(8/3 n_embd / 64) in integers
        self.gate = nn.Linear(n_embd, hidden, bias=bias)
        self.up = nn.Linear(n_embd, hidden, bias=bias)
        self.down = nn.Linear(hidden, n_embd, bias=bias)

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        gate, up = self.gate(x), self.up(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return self.down(F.silu(gate) * up)


POSITIONS = {"rope": Rotary, "learned": LearnedPosition}
NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
MLPS = {"gelu": GELUMLP, "gelu_tanh": TanhGELUMLP, "swiglu": SwiGLUMLP}


class KVCache:
    """Keys and values of one attention for the tokens read so far."""

    def __init__(self) -> None:
        self._past: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Number of tokens read so far."""
        return 0 if self._past is None else self._past[0].shape[2]

    def extend(
        self, k: Float[Tensor, "batch head time dim"], v: Float[Tensor, "batch head time dim"]
    ) -> tuple[Float[Tensor, "batch head total dim"], Float[Tensor, "batch head total dim"]]:
        """Appends keys and values; returns all keys and values."""
        if self._past is not None:
            k, v = torch.cat([self._past[0], k], dim=2), torch.cat([self._past[1], v], dim=2)
        self._past = k, v
        return k, v


def repeated(shared: Float[Tensor, "batch kv_head time dim"], n_head: int) -> Float[Tensor, "batch {n_head} time dim"]:
    """Returns keys or values of `n_head` heads: each of the fewer heads for every query of its group."""
    # Not by PyTorch's `enable_gqa`, which is experimental: version and card decide which kernels have it, and the one
    # that always has stores all scores. This way, softcap, sink and monitors find a head of keys for each of queries.
    groups = n_head // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, dim=1)


class DotProduct(nn.Module):
    """Softmax attention; a module of its own so that monitors can hook it and a config can keep it in fp32."""

    def __init__(self, softcap: NoSoftcap, dropout: float, sink: nn.Parameter | None = None) -> None:
        super().__init__()
        known = signature(softcap.attend).parameters.values()
        if sink is not None and not any(each.name == "sink" or each.kind is each.VAR_KEYWORD for each in known):
            raise ConfigError(
                f"softmax: {type(softcap).__name__}.attend() takes no sink, and this softmax has one; fix: "
                "softmax=plain, or add the argument, see NoSoftcap.attend"
            )
        self.softcap = softcap
        self.dropout = dropout
        self.sink = sink

    def forward(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch head key dim"],
        v: Float[Tensor, "batch head key dim"],
    ) -> Float[Tensor, "batch head query dim"]:
        """Computes causal attention; the last query is aligned with the last key."""
        more = {} if self.sink is None else {"sink": self.sink}
        return self.softcap.attend(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0, **more)


class Attention(nn.Module):
    """Causal self-attention.

    With fewer heads of keys and values than of queries (`n_kv_head`), each of them serves a group of
    `n_head / n_kv_head` neighbouring queries: grouped-query attention, arXiv 2305.13245.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        bias: bool,
        dropout: float,
        qknorm: NoQKNorm,
        softcap: NoSoftcap,
        qkclip: NoQKClip,
        softmax: PlainSoftmax,
        attention_gate: NoAttentionGate,
        n_kv_head: int | None = None,
    ) -> None:
        super().__init__()
        self.n_head = n_head
        self.n_kv_head = n_head if n_kv_head is None else n_kv_head
        shared = n_embd // n_head * self.n_kv_head
        # Not fused, so that the norms of weights and gradients are known for each: logits grow through q and k.
        self.query = nn.Linear(n_embd, n_embd, bias=bias)
        self.key = nn.Linear(n_embd, shared, bias=bias)
        self.value = nn.Linear(n_embd, shared, bias=bias)
        self.query_norm = qknorm(n_embd // n_head)
        self.key_norm = qknorm(n_embd // n_head)
        self.meter = qkclip.meter(n_head)
        self.dot_product = DotProduct(softcap, dropout, softmax.sink(n_head))
        self.gate = attention_gate(n_embd, n_head, bias)
        self.out = nn.Linear(n_embd, n_embd, bias=bias)

    def heads(self) -> dict[Tensor, int]:
        """Returns the matrices whose rows are those of one head after another, with their number of heads."""
        shared = dict.fromkeys((self.key.weight, self.value.weight), self.n_kv_head)
        return {self.query.weight: self.n_head} | shared

    def forward(
        self, x: Float[Tensor, "batch time width"], position: Rotary | LearnedPosition, cache: KVCache | None
    ) -> Float[Tensor, "batch time width"]:
        """Attends to the tokens in `cache` and in `x`; appends those of `x` to `cache`."""
        start = 0 if cache is None else cache.length
        q = self.query(x).unflatten(-1, (self.n_head, -1))
        k, v = [projection(x).unflatten(-1, (self.n_kv_head, -1)) for projection in (self.key, self.value)]
        # Rotated as the projections wrote them, `[batch, time, head, dim]`; attention takes `[batch, head, time, dim]`.
        q = position.rotate(self.query_norm(q), start)
        k = position.rotate(self.key_norm(k), start)
        q, k, v = [each.transpose(1, 2) for each in (q, k, v)]
        self.meter(q, k)
        if cache is not None:
            k, v = cache.extend(k, v)  # not repeated: a small cache is what fewer heads are for
        k, v = [repeated(each, self.n_head) for each in (k, v)]
        y = self.dot_product(q, k, v).transpose(1, 2)
        if self.gate is not None:
            y = self.gate(y, x)
        return self.out(y.flatten(2))
