"""A small GPT: a decoder from tokens to logits, pre-LN by default.

    x = embedding(tokens)
    x = x + attention(norm(x));  x = x + mlp(norm(x))        in each block
    logits = head(norm(x))

Sources: GPT-2 (Radford et al. 2019) for the shape, RoPE (arXiv 2104.09864), SwiGLU (arXiv 2002.05202), RMSNorm
(arXiv 1910.07467). QK-norm, softmax, softcap, QK-clip, the attention's gate and the placement of the norms are objects
passed to the constructor. Positions, norms and MLPs are looked up by name in `layers.py`.
"""

from functools import partial
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.models.head import Head, TiedHead, weight_for_product
from stabletrain.models.layers import (
    GELUMLP,
    MLPS,
    NORMS,
    POSITIONS,
    Attention,
    KVCache,
    LearnedPosition,
    Rotary,
    SwiGLUMLP,
)
from stabletrain.stability.attention_gate import NoAttentionGate
from stabletrain.stability.norm_placement import PreNorm
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.softcap import NoSoftcap
from stabletrain.stability.softmax import PlainSoftmax

NO_QKNORM, NO_SOFTCAP, NO_QKCLIP = NoQKNorm(), NoSoftcap(), NoQKClip()
PLAIN_SOFTMAX, NO_ATTENTION_GATE = PlainSoftmax(), NoAttentionGate()
PRE_NORM = PreNorm()


class Block(nn.Module):
    """One block: attention, then MLP, each added to the residual stream.

    Args:
        attention_output_norm, mlp_output_norm: the second norms of the branches; None if they have one each.
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: Attention,
        mlp_norm: nn.Module,
        mlp: GELUMLP | SwiGLUMLP,
        dropout: float,
        norm_placement: PreNorm = PRE_NORM,
        attention_output_norm: nn.Module | None = None,
        mlp_output_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.norm_placement = norm_placement
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_output_norm = attention_output_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_output_norm = mlp_output_norm
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "batch time width"], position: Rotary | LearnedPosition, cache: KVCache | None
    ) -> Float[Tensor, "batch time width"]:
        attend = partial(self.attention, position=position, cache=cache)
        x = self.norm_placement(x, attend, self.attention_norm, self.attention_output_norm, self.dropout)
        return self.norm_placement(x, self.mlp, self.mlp_norm, self.mlp_output_norm, self.dropout)


class GPT(nn.Module):
    """A decoder with nanoGPT's argument names. The defaults are those of `model=gpt_nano` on `data=stdlib`.

    Modules: `embedding`, `position`, `blocks.<i>.{attention_norm, attention, mlp_norm, mlp}`, `norm`, `head`; and
    `blocks.<i>.{attention_output_norm, mlp_output_norm}` with a norm after each branch as well as before.
    Parameters are fp32 with PyTorch's default initialisation; `stability/init.py` overwrites it.

    Args:
        block_size: maximum sequence length.
        n_head: number of attention heads; divides `n_embd`.
        n_kv_head: number of heads of keys and values, each shared by `n_head / n_kv_head` heads of queries
            (grouped-query attention, arXiv 2305.13245); divides `n_head`. None for as many as `n_head`.
        n_embd: width of the residual stream.
        position: `rope` or `learned`.
        norm: `layernorm` or `rmsnorm`.
        norm_eps: added to the variance (LayerNorm) or mean square (RMSNorm).
        mlp: `gelu`, `gelu_tanh` (GPT-2's, the tanh approximation) or `swiglu`.
        swiglu_limit: bound of the two factors of a SwiGLU; None for none.
        bias: whether LayerNorms and linear layers, except the head, have biases.
        tied_head: whether the head shares the embedding matrix, which then appears once in the state dict.
        dropout: dropout probability of the embeddings, the attention weights and each branch's output, in [0, 1).
        embedding_gradient: factor of the embedding's gradient, in (0, 1]; 0.1 in GLM-130B (arXiv 2210.02414, section
            3.3). It does not apply to the gradient of a tied head.

    Raises:
        ConfigError: a value is out of range, or a name is unknown.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        block_size: int = 128,
        n_layer: int = 4,
        n_head: int = 4,
        n_kv_head: int | None = None,
        n_embd: int = 128,
        position: str = "rope",
        norm: str = "layernorm",
        norm_eps: float = 1e-6,
        mlp: str = "gelu",
        swiglu_limit: float | None = None,
        bias: bool = False,
        tied_head: bool = False,
        dropout: float = 0.0,
        embedding_gradient: float = 1.0,
        qknorm: NoQKNorm = NO_QKNORM,
        softcap: NoSoftcap = NO_SOFTCAP,
        qkclip: NoQKClip = NO_QKCLIP,
        softmax: PlainSoftmax = PLAIN_SOFTMAX,
        attention_gate: NoAttentionGate = NO_ATTENTION_GATE,
        norm_placement: PreNorm = PRE_NORM,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        check_heads(n_embd, n_head, n_kv_head)
        if not 0 <= dropout < 1:
            raise ConfigError(f"model.dropout={dropout} is outside [0, 1): use 0 for none")
        if not norm_eps > 0:
            raise ConfigError(f"model.norm_eps={norm_eps} is not above 0: equal values would be divided by 0; use 1e-6")
        if norm_eps > 1:
            raise ConfigError(f"model.norm_eps={norm_eps} is above 1: it would hide the size of the values; use 1e-6")
        if not 0 < embedding_gradient <= 1:
            raise ConfigError(f"model.embedding_gradient={embedding_gradient} is outside (0, 1]: 0.1 is GLM-130B's")
        make_norm, make_mlp = partial(choice("norm", norm, NORMS), n_embd, norm_eps, bias), choice("mlp", mlp, MLPS)
        check_limit(swiglu_limit, mlp)
        limits = {} if swiglu_limit is None else {"limit": swiglu_limit}
        self.block_size = block_size
        self.n_layer = n_layer
        self.softcap = softcap
        self.embedding_gradient = embedding_gradient
        self.embedding = nn.Embedding(vocab_size, n_embd)
        self.position = choice("position", position, POSITIONS)(block_size, n_embd, n_embd // n_head)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                attention_norm=make_norm(),
                attention=Attention(
                    n_embd, n_head, bias, dropout, qknorm, softcap, qkclip, softmax, attention_gate, n_kv_head
                ),
                mlp_norm=make_norm(),
                mlp=make_mlp(n_embd, bias, **limits),
                dropout=dropout,
                norm_placement=norm_placement,
                attention_output_norm=norm_placement.output_norm(make_norm),
                mlp_output_norm=norm_placement.output_norm(make_norm),
            )
            for _ in range(n_layer)
        )
        self.norm = norm_placement.final_norm(make_norm)
        self.head = TiedHead() if tied_head else Head(n_embd, vocab_size)

    def forward(
        self, inputs: Int[Tensor, "batch time"], cache: list[KVCache] | None = None, *, head: bool = True
    ) -> Float[Tensor, "batch time vocab_or_width"]:
        """Returns the logits of the next token at each position, in the dtype of the head's output under autocast.

        Args:
            inputs: token ids.
            cache: from `new_cache`, updated in place; `inputs` are the tokens that follow the cached ones.
            head: False to return the features `[batch, time, width]` before the head; see `logits`.

        Raises:
            ValueError: cached tokens and `inputs` together are longer than `block_size`.
        """
        start = cache[0].length if cache else 0
        if (length := start + inputs.shape[1]) > self.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than model.block_size={self.block_size}")
        x = self.embedding(inputs)
        if (share := self.embedding_gradient) < 1:
            x = x.detach() + share * (x - x.detach())  # scales the gradient only: the added difference is exactly 0
        x = self.dropout(self.position(x, start))
        for i, block in enumerate(self.blocks):
            x = block(x, self.position, cache[i] if cache else None)
        x = self.norm(x)
        return self.logits(x) if head else x

    def logits(
        self, features: Float[Tensor, "*tokens width"], weight: Float[Tensor, "rows width"] | None = None
    ) -> Float[Tensor, "*tokens vocab"]:
        """Applies head and final softcap to features; each token is independent of the others.

        Args:
            features: from `forward(inputs, head=False)`.
            weight: from `head_weight`, so that calls for several chunks share one copy; None to make it here.
        """
        own = (self.embedding.weight,) if isinstance(self.head, TiedHead) else ()
        return self.softcap.final(self.head(features, *own, *(() if weight is None else (weight,))))

    def head_weight(self) -> Float[Tensor, "rows width"]:
        """Returns the head's weight as its product takes it: under autocast a padded copy, else the parameter."""
        own = self.embedding.weight if isinstance(self.head, TiedHead) else self.head.weight
        return weight_for_product(own, self.head.in_fp32)

    def new_cache(self) -> list[KVCache]:
        """Returns an empty cache for each block; `forward` fills them."""
        return [KVCache() for _ in self.blocks]

    def classifier(self) -> nn.Module:
        """Returns the module that holds the weight of the head: the head, or the embedding it is tied to."""
        return self.embedding if isinstance(self.head, TiedHead) else self.head

    def residual_projections(self) -> list[nn.Linear]:
        """Returns the linear layers that write to the residual stream, two per block; inits scale them by depth.

        There are none if a norm stands between: it would undo the scale.
        """
        blocks = [
            each for each in self.blocks if isinstance(each, Block) and not each.norm_placement.normalises_branches
        ]
        return [linear for block in blocks for linear in (block.attention.out, block.mlp.down)]


def check_sizes(**sizes: int) -> None:
    """Raises ConfigError if a size is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"model.{name}={size} is below 1; fix: model.{name}=1 or more")


def check_heads(n_embd: int, n_head: int, n_kv_head: int | None) -> None:
    """Raises ConfigError if `n_embd` is not a multiple of `n_head`, or `n_head` not one of `n_kv_head`."""
    if n_embd % n_head:
        raise ConfigError(
            f"model.n_embd={n_embd} is not a multiple of model.n_head={n_head}: "
            f"choose n_embd={-(-n_embd // n_head) * n_head} or another number of heads"
        )
    if n_kv_head is not None and (n_kv_head < 1 or n_head % n_kv_head):
        divisors = ", ".join(str(number) for number in range(1, n_head + 1) if n_head % number == 0)
        raise ConfigError(
            f"model.n_kv_head={n_kv_head} does not divide model.n_head={n_head}: every head of keys and values serves "
            f"as many heads of queries; fix: model.n_kv_head=null, or one of {divisors}"
        )


def check_limit(swiglu_limit: float | None, mlp: str) -> None:
    """Raises ConfigError if the limit is no finite number above 0, or the MLP is no SwiGLU."""
    if swiglu_limit is None:
        return
    if mlp != "swiglu":
        raise ConfigError(
            f"model.swiglu_limit={swiglu_limit} does nothing with model.mlp={mlp}; fix: model.mlp=swiglu, or "
            "model.swiglu_limit=null"
        )
    if not 0 < swiglu_limit < float("inf"):
        raise ConfigError(
            f"model.swiglu_limit={swiglu_limit} is not a finite number above 0: DeepSeek-V4 uses 10, gpt-oss 7; fix: "
            "model.swiglu_limit=10, or null for no limit"
        )


def choice(key: str, name: str, table: dict[str, Any]) -> Any:
    """Returns the entry `name` of `table`, or raises ConfigError with the choices."""
    if name not in table:
        raise ConfigError(f"model.{key}={name} is unknown: choose {' or '.join(table)}")
    return table[name]
