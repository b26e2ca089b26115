"""The layers a GPT chooses by name: where a token stands, how a width is normalised, what an MLP computes.

Each table, `POSITIONS`, `NORMS` and `MLPS`, maps the names of a config to classes with one signature, so that the model
has no branch on a kind.
"""

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
