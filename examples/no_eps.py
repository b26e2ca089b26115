"""A model with a bug: it divides by a standard deviation without an epsilon.

    python train.py --config-dir examples/conf experiment=no_eps

Takes ten seconds on two CPU cores. A byte-level language model, which sees a byte's embedding beside the same
standardized over the last `WINDOW` bytes. Where these are equal, as in a line of dashes, it divides 0 by 0. With
`guard=off` the weights are NaN from that step on. With the default guard such steps are skipped, and the incident names
the line below. `docs/held.py` draws both runs. (The step depends on the text, which is that of Python's library.)
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WINDOW = 64


class Model(nn.Module):
    """Predicts the next byte from the embedding of one byte and its standardized form.

    Args:
        width: of the embedding.
        vocab_size: number of tokens.
        eps: is added to the variance. The bug is its default, 0; 1e-6 is the fix.
    """

    def __init__(self, width: int = 32, vocab_size: int = 256, eps: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(2 * width, vocab_size)
        self.eps = eps

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits of shape `(batch, time, vocab_size)` for tokens of shape `(batch, time)`."""
        x = self.embedding(tokens)
        recent = F.pad(x, (0, 0, WINDOW - 1, 0)).unfold(1, WINDOW, 1)  # zeros before the first byte
        standard = (x - recent.mean(-1)) / (recent.var(-1) + self.eps).sqrt()
        return self.head(torch.cat([x, standard], -1))
