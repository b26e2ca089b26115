"""The head of a GPT: its matrix product runs over a vocabulary that is a multiple of 64.

    logits = x W^T,      W = [weight; zeros], cast to half precision;      the logits of the zeros are cut off

GPU kernels read rows of 16 bytes or more at once. With 50,257 half-precision logits a token, no row but the first
begins at such an address, and cuBLAS falls back to slower kernels, forward and backward. Only the half-precision copy
of the weight is padded: parameters, gradients, checkpoints and counts keep their rows. In fp32 there is no copy, so
nothing is padded there. The padded logits are cut off instead of set to -inf, so a trace of non-finite values never
meets them.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

ROWS_MULTIPLE = 64
"""The rows of the copy are padded to a multiple of this."""


def weight_for_product(weight: Float[Tensor, "vocab width"], wide: bool = False) -> Float[Tensor, "rows width"]:
    """Returns the weight as the product takes it: under autocast a copy in its dtype with zeros below, else itself.

    Args:
        weight: fp32, or already in autocast's dtype.
        wide: whether the head computes in fp32 although autocast is on.
    """
    kind = weight.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # "meta" has none
    if wide or weight.dtype == torch.float64 or not autocast:
        return weight
    copy = weight.to(torch.get_autocast_dtype(kind))
    missing = -len(weight) % ROWS_MULTIPLE
    return torch.cat([copy, copy.new_zeros(missing, weight.shape[1])]) if missing else copy


def product(
    x: Float[Tensor, "*tokens width"], weight: Float[Tensor, "rows width"], vocab: int
) -> Float[Tensor, "*tokens vocab"]:
    """Returns the logits of the first `vocab` rows of a weight from `weight_for_product`."""
    logits = F.linear(x, weight)
    return logits if len(weight) == vocab else logits[..., :vocab]


class Head(nn.Linear):
    """A head with a weight of its own and no bias.

    Attributes:
        in_fp32: set on the class of an fp32 module (`stability/precision/autocast.py`).
        only_multiplies: tells `precision=bf16_params` that this subclass uses its weight as `nn.Linear` does.
    """

    in_fp32 = False
    only_multiplies = True

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__(width, vocab, bias=False)

    def forward(
        self, input: Float[Tensor, "*tokens width"], weight: Float[Tensor, "rows width"] | None = None
    ) -> Float[Tensor, "*tokens vocab"]:
        """Returns the logits; `weight`, if given, is from `weight_for_product`."""
        weight = weight_for_product(self.weight, self.in_fp32) if weight is None else weight
        return product(input, weight, self.out_features)


class TiedHead(nn.Module):
    """A head without weights of its own: it multiplies features with the embedding matrix.

    Attributes:
        in_fp32: set on the class of an fp32 module (`stability/precision/autocast.py`).
    """

    in_fp32 = False

    def forward(
        self,
        x: Float[Tensor, "*tokens width"],
        embedding: Float[Tensor, "vocab width"],
        weight: Float[Tensor, "rows width"] | None = None,
    ) -> Float[Tensor, "*tokens vocab"]:
        """Returns the logits; `weight`, if given, is the embedding from `weight_for_product`."""
        weight = weight_for_product(embedding, self.in_fp32) if weight is None else weight
        return product(x, weight, len(embedding))
