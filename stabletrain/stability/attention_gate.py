"""Attention gate: multiplies the output of attention by a sigmoid of the block's normed input.

    y <- y * sigmoid(W_g x)        before the output projection; x is what query, key and value read

A head that has nothing to add closes its gate, so it needs no attention sink to do so. With gates, training had fewer
loss spikes, activations stayed smaller, and larger learning rates converged. Source: arXiv 2505.06708, section 2.2,
gate G1, and its code (qiuzh20/gated_attention). Qwen3-Next has one gate for each value.

A kind of gate is called once for each attention and returns its module, or None.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError


class Gate(nn.Module):
    """Gates from a linear layer, `outputs` in all: one for each head, or one for each value of each head."""

    def __init__(self, n_embd: int, n_head: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.n_head = n_head
        self.projection = nn.Linear(n_embd, outputs, bias=bias)

    def forward(
        self, y: Float[Tensor, "batch time head dim"], x: Float[Tensor, "batch time width"]
    ) -> Float[Tensor, "batch time head dim"]:
        """Returns `y` times the gates of `x`, in the dtype of `y`."""
        scores = self.projection(x).unflatten(-1, (self.n_head, -1))
        # In bf16 the sigmoid rounds to 1 above a score of about 6, and its slope would be 0.
        wide = scores if scores.dtype == torch.float64 else scores.float()
        return y * torch.sigmoid(wide).to(y.dtype)


@dataclass(frozen=True)
class NoAttentionGate:
    """No gate. Base class of all kinds, and what each must offer."""

    def __call__(self, n_embd: int, n_head: int, bias: bool) -> nn.Module | None:
        """Returns the module that attention calls with its output and its input: none.

        Args:
            n_embd: width of the input.
            n_head: number of heads; divides `n_embd`.
            bias: whether the model's linear layers have biases.
        """
        return None


@dataclass(frozen=True)
class SigmoidGate(NoAttentionGate):
    """Sigmoid gates.

    Attributes:
        per: `head` for one gate for each head, `element` for one for each value.
    """

    per: str = "head"

    def __post_init__(self) -> None:
        if self.per not in ("head", "element"):
            raise ConfigError(f"attention_gate.per={self.per} is unknown: choose head or element")

    def __call__(self, n_embd: int, n_head: int, bias: bool) -> nn.Module | None:
        """Returns a gate; with the model's inits all gates start around 1/2."""
        return Gate(n_embd, n_head, n_head if self.per == "head" else n_embd, bias)
