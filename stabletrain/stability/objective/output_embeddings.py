"""Output embedding centering: keeps the mean mu of the rows of the head's weight near 0.

    mu_loss       total = ce + coefficient * |mu|^2
    centering     W <- W - mu                          after each update

The mean over the vocabulary of a token's logits is mu . h. Output logits that diverge do so together, along mu, and
z-loss penalises only what mu does to log Z. Without a final softcap, centering shifts all logits of a token by the same
mu . h, so it leaves the probabilities as they are. A tied head is the embedding, whose rows then move too, as in the
paper. Source: Stollenwerk et al., arXiv 2601.02031, and their code, github.com/flxst/output-embedding-centering.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.parallel.shards import is_sharded, local_parts, sum_over_shards
from stabletrain.stability.after_update import LARGEST_INITIAL_WEIGHT, AfterUpdate
from stabletrain.stability.objective.cross_entropy import NoZLoss, head_weight


def mean_row(weight: Float[Tensor, "rows *columns"]) -> Float[Tensor, "*columns"]:
    """Returns the mean of the rows, in fp32 (fp64 stays fp64)."""
    return weight.mean(dim=0, dtype=torch.promote_types(weight.dtype, torch.float32))


@dataclass(frozen=True)
class MuLoss(NoZLoss):
    """The penalty `coefficient * |mu|^2`, with the gradient `2 coefficient mu / rows` for every row.

    Attributes:
        coefficient: 1e-4 in the paper.
    """

    coefficient: float
    needs_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.coefficient < float("inf"):
            raise ConfigError(
                f"zloss.coefficient={self.coefficient} is not a finite number above 0: the paper of mu-loss uses 1e-4; "
                "use zloss=none for none"
            )

    def of_head(self, weight: Float[Tensor, "rows *columns"]) -> Float[Tensor, ""]:
        """Returns the penalty of the whole step."""
        return self.coefficient * mean_row(weight).square().sum()


@dataclass(frozen=True)
class Centering(AfterUpdate):
    """Subtracts the mean row of the head's weight. Its moments and its weight decay are not affected.

    A weight with a value above about half of `LARGEST_INITIAL_WEIGHT` stays as it is. The subtraction at most doubles
    the largest value, so what it writes is no larger than what a run may start with (`optimizers/closed.py`).
    """

    @torch.no_grad()
    def __call__(self, model: nn.Module, gate: Bool[Tensor, ""]) -> None:
        """Centres the weight if `gate` is open; otherwise changes no bit, because `w - 0` is `w`."""
        whole = head_weight(model)
        (weight,), wide = local_parts([whole]), torch.promote_types(whole.dtype, torch.float32)
        # NaN if a value is; a rank may have no row.
        largest = torch.linalg.vector_norm(weight, float("inf"), dtype=wide) if len(weight) else weight.new_zeros(())
        large = ~(largest < 0.49 * LARGEST_INITIAL_WEIGHT)
        if is_sharded(whole):  # one all-reduce, for the mean and for what any rank has found
            row = torch.cat([weight.sum(dim=0, dtype=wide).flatten(), large.to(wide)[None]])
            sums = sum_over_shards(row[None], [whole])[0]
            mean, large = (sums[:-1] / len(whole)).view(whole.shape[1:]), sums[-1] > 0
        else:
            mean = mean_row(weight)
        weight.sub_(torch.where(gate & ~large, mean, 0.0))


@dataclass(frozen=True)
class MuCentering(NoZLoss):
    """No z-loss; centres the output embeddings after each update."""

    needs_head: ClassVar[bool] = True
    after_update: ClassVar[AfterUpdate] = Centering()
