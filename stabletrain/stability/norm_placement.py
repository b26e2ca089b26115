"""Norm placement: where the norms of a block stand around its two branches f, attention and MLP.

    pre         x + f(N(x))
    sandwich    x + M(f(N(x)))       N and M are two norms
    reordered   x + N(f(x))
    post        N(x + f(x))

With pre, nothing bounds what a branch adds, so the residual stream may grow exponentially with depth during training.
With sandwich and reordered, a branch adds a vector whose RMS is the gain of its norm, so the stream's variance grows
linearly. With post, it does not grow, but in deep networks gradients vanish without a long warmup. Sources: Peri-LN,
arXiv 2502.02732 (sandwich, as in Gemma 2, arXiv 2408.00118); OLMo 2, arXiv 2501.00656 (reordered); Vaswani et al.,
arXiv 1706.03762, section 5.4 (post); Xiong et al., arXiv 2002.04745, compare pre and post.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

Stream = Float[Tensor, "batch time width"]
"""The residual stream, or what a branch adds to it."""

MakeNorm = Callable[[], nn.Module]
"""Returns a new norm over the width."""


@dataclass(frozen=True)
class PreNorm:
    """A norm before each branch. Base class of all kinds, and what each must offer.

    Attributes:
        normalises_branches: whether what a branch adds is normalised. Then the scale of the branch's last weights has
            no effect, and an init that makes it small would only bring the variance near the norm's eps.
    """

    normalises_branches: ClassVar[bool] = False

    def output_norm(self, make_norm: MakeNorm) -> nn.Module | None:
        """Returns the second norm of a branch; None if it has one norm, as here."""
        return None

    def final_norm(self, make_norm: MakeNorm) -> nn.Module:
        """Returns the norm between the last block and the head."""
        return make_norm()

    def __call__(
        self,
        x: Stream,
        branch: Callable[[Stream], Stream],
        norm: nn.Module,
        output_norm: nn.Module | None,
        dropout: nn.Module,
    ) -> Stream:
        """Returns the residual stream after a branch.

        Args:
            norm: the branch's norm.
            output_norm: from `output_norm`.
            dropout: of what the branch adds.
        """
        return x + dropout(branch(norm(x)))


@dataclass(frozen=True)
class SandwichNorm(PreNorm):
    """A norm before and a norm after each branch; the gains of both start at 1. Embeddings are not normalised."""

    normalises_branches: ClassVar[bool] = True

    def output_norm(self, make_norm: MakeNorm) -> nn.Module | None:
        """Returns a norm."""
        return make_norm()

    def __call__(
        self,
        x: Stream,
        branch: Callable[[Stream], Stream],
        norm: nn.Module,
        output_norm: nn.Module | None,
        dropout: nn.Module,
    ) -> Stream:
        """See `PreNorm`."""
        assert output_norm is not None
        return x + dropout(output_norm(branch(norm(x))))


@dataclass(frozen=True)
class ReorderedNorm(PreNorm):
    """A norm after each branch, before the sum: OLMo 2's reordered norm."""

    normalises_branches: ClassVar[bool] = True

    def __call__(
        self,
        x: Stream,
        branch: Callable[[Stream], Stream],
        norm: nn.Module,
        output_norm: nn.Module | None,
        dropout: nn.Module,
    ) -> Stream:
        """See `PreNorm`."""
        return x + dropout(norm(branch(x)))


@dataclass(frozen=True)
class PostNorm(PreNorm):
    """A norm after each sum: post-LN, of the first transformer. The last block's output is normalised already."""

    def final_norm(self, make_norm: MakeNorm) -> nn.Module:
        """Returns the identity."""
        return nn.Identity()

    def __call__(
        self,
        x: Stream,
        branch: Callable[[Stream], Stream],
        norm: nn.Module,
        output_norm: nn.Module | None,
        dropout: nn.Module,
    ) -> Stream:
        """See `PreNorm`."""
        return norm(x + dropout(branch(x)))
