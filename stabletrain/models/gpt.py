"""A small GPT: a pre-LN decoder that turns tokens into logits and knows nothing of losses, precisions or configs.

    x = embedding(tokens)
    x = x + attention(norm(x));  x = x + mlp(norm(x))        in each block
    logits = head(norm(x))

Sources: GPT-2 (Radford et al. 2019) for the shape, RoPE (arXiv 2104.09864), SwiGLU (arXiv 2002.05202), RMSNorm
(arXiv 1910.07467). QK-norm and softcap are objects handed in; positions, norms and MLPs are looked up in `layers.py`.
So this file names no kind of any of them.
"""

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.models.layers import GELUMLP, MLPS, NORMS, POSITIONS, LearnedPosition, Rotary, SwiGLUMLP


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


class TiedHead(nn.Module):
    """A head without weights of its own: logits are products with the embedding's rows."""

    def forward(
        self, x: Float[Tensor, "batch time width"], embedding: Float[Tensor, "vocab width"]
    ) -> Float[Tensor, "batch time vocab"]:
        return F.linear(x, embedding)


class Block(nn.Module):
    """One pre-LN block: attention, then MLP, each added to the residual stream."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: Attention,
        mlp_norm: nn.Module,
        mlp: GELUMLP | SwiGLUMLP,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "batch time width"], position: Rotary | LearnedPosition, cache: KVCache | None
    ) -> Float[Tensor, "batch time width"]:
        x = x + self.dropout(self.attention(self.attention_norm(x), position, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A pre-LN decoder; the names of its arguments are nanoGPT's.

    Its modules: `embedding`, `position`, `blocks.<i>.{attention_norm, attention, mlp_norm, mlp}`, `norm`, `head`.
    Parameters are fp32 on construction, as PyTorch's layers make them; `stability/init.py` rewrites them.

    Args:
        vocab_size: number of tokens.
        block_size: longest sequence.
        n_layer: blocks.
        n_head: attention heads; divides `n_embd`.
        n_embd: width of the residual stream.
        position: `rope` or `learned`.
        norm: `layernorm` or `rmsnorm`.
        norm_eps: added to the norms' variance, or mean square.
        mlp: `gelu` or `swiglu`.
        bias: whether linear layers, except the head, and LayerNorms have biases.
        tied_head: whether the head is the embedding's matrix, which then appears once in the state dict.
        dropout: share dropped of the embeddings, the attention weights and each branch's output, in [0, 1).
        qknorm: a kind of QK-norm.
        softcap: a kind of softcap.
        qkclip: a kind of QK-clip.
        embedding_gradient: share of the gradient that reaches the embedding, in (0, 1]; GLM-130B shrinks it to 0.1
            (arXiv 2210.02414, section 3.3). A tied head's own gradient stays whole.

    Raises:
        ConfigError: a value outside its bound, or a name that is no choice.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        block_size: int,
        n_layer: int,
        n_head: int,
        n_embd: int,
        position: str,
        norm: str,
        mlp: str,
        bias: bool,
        tied_head: bool,
        dropout: float,
        qknorm: QKNorm,
        softcap: Softcap,
        qkclip: QKClip,
        norm_eps: float = 1e-6,
        embedding_gradient: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        if n_embd % n_head:
            raise ConfigError(
                f"model.n_embd={n_embd} is not a multiple of model.n_head={n_head}: "
                f"choose n_embd={-(-n_embd // n_head) * n_head} or another number of heads"
            )
        if not 0 <= dropout < 1:
            raise ConfigError(f"model.dropout={dropout} is outside [0, 1): use 0 for none")
        if not norm_eps > 0:
            raise ConfigError(f"model.norm_eps={norm_eps} is not above 0: equal values would be divided by 0; use 1e-6")
        if not 0 < embedding_gradient <= 1:
            raise ConfigError(f"model.embedding_gradient={embedding_gradient} is outside (0, 1]: 0.1 is GLM-130B's")
        make_norm, make_mlp = choice("norm", norm, NORMS), choice("mlp", mlp, MLPS)
        self.block_size = block_size
        self.n_layer = n_layer
        self.softcap = softcap
        self.embedding_gradient = embedding_gradient
        self.embedding = nn.Embedding(vocab_size, n_embd)
        self.position = choice("position", position, POSITIONS)(block_size, n_embd, n_embd // n_head)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                attention_norm=make_norm(n_embd, norm_eps, bias),
                attention=Attention(n_embd, n_head, bias, dropout, qknorm, softcap, qkclip),
                mlp_norm=make_norm(n_embd, norm_eps, bias),
                mlp=make_mlp(n_embd, bias),
                dropout=dropout,
            )
            for _ in range(n_layer)
        )
        self.norm = make_norm(n_embd, norm_eps, bias)
        self.head = TiedHead() if tied_head else nn.Linear(n_embd, vocab_size, bias=False)

    def forward(
        self, inputs: Int[Tensor, "batch time"], cache: list[KVCache] | None = None
    ) -> Float[Tensor, "batch time vocab"]:
        """Logits of the token after each of `inputs`, in the dtype autocast gives the head.

        Args:
            inputs: token ids.
            cache: from `new_cache`; `inputs` then continue what it has read, and are added to it.

        Raises:
            ValueError: the sequence, with what the cache holds, is longer than `block_size`.
        """
        start = cache[0].length if cache else 0
        if (length := start + inputs.shape[1]) > self.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than model.block_size={self.block_size}")
        x = self.embedding(inputs)
        if (share := self.embedding_gradient) < 1:
            x = x.detach() + share * (x - x.detach())  # the value keeps its bits
        x = self.dropout(self.position(x, start))
        for i, block in enumerate(self.blocks):
            x = block(x, self.position, cache[i] if cache else None)
        x = self.norm(x)
        logits = self.head(x, self.embedding.weight) if isinstance(self.head, TiedHead) else self.head(x)
        return self.softcap.final(logits)

    def new_cache(self) -> list[KVCache]:
        """An empty cache, one part for each block; `forward` fills it."""
        return [KVCache() for _ in self.blocks]

    def classifier(self) -> nn.Module:
        """The module whose weight makes the logits: the head, or the embedding it is tied to."""
        return self.embedding if isinstance(self.head, TiedHead) else self.head

    def residual_projections(self) -> list[nn.Linear]:
        """The linear layers whose output is added to the residual stream: two a block; inits scale them by depth."""
        blocks = [module for module in self.blocks if isinstance(module, Block)]
        return [linear for block in blocks for linear in (block.attention.out, block.mlp.down)]


def check_sizes(**sizes: int) -> None:
    """Refuses a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"model.{name}={size} is below 1")


def choice(key: str, name: str, table: dict[str, Any]) -> Any:
    """The entry of `table`, or an error that names the choices."""
    if name not in table:
        raise ConfigError(f"model.{key}={name} is unknown: choose {' or '.join(table)}")
    return table[name]
