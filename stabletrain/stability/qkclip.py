"""QK-clip: after an update, the projections of heads whose attention logits grew too large are scaled down.

    W_q, W_k <- sqrt(gamma) W_q, sqrt(gamma) W_k       gamma = min(1, max_logit / S_max),  per head

S_max is the head's largest attention logit q·k / sqrt(d) in the forward passes of the step. Their product then shrinks
by gamma, so the next step's logits start from the bound, and attention itself is computed as without it. Source: Kimi
K2, arXiv 2507.20534, section 2.1 (there with Muon; any optimizer will do).

A kind of QK-clip makes the meter that each attention shows its queries and keys, and is called after the update.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError


class NoMeter(nn.Module):
    """Sees queries and keys, and remembers nothing."""

    def forward(self, q: Tensor, k: Tensor) -> None:
        """Nothing."""
        del q, k


class LogitMeter(nn.Module):
    """Remembers each head's largest causal attention logit since it was last cleared, while training.

    Its buffer is no part of checkpoints: it is 0 between steps. The scores are computed in fp32 and thrown away: one
    more matrix product a block, and `[batch, head, query, key]` floats for a moment.
    """

    def __init__(self, n_head: int) -> None:
        super().__init__()
        self.register_buffer("max_logit", torch.zeros(n_head), persistent=False)

    @torch.no_grad()
    def forward(self, q: Float[Tensor, "batch head time dim"], k: Float[Tensor, "batch head time dim"]) -> None:
        """Raises the maxima to this micro-batch's."""
        if not self.training:
            return
        with torch.autocast(q.device.type, enabled=False):
            scores = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-2, -1)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        seen = self.get_buffer("max_logit")
        seen.copy_(torch.maximum(seen, scores.masked_fill(future, 0.0).amax(dim=(0, 2, 3))))


@dataclass(frozen=True)
class NoQKClip:
    """Weights stay as the optimizer leaves them."""

    def meter(self, n_head: int) -> nn.Module:
        """A meter that remembers nothing."""
        del n_head
        return NoMeter()

    def maxima(self, model: nn.Module) -> list[Tensor]:
        """Nothing is measured."""
        del model
        return []

    def __call__(self, model: nn.Module, gate: Bool[Tensor, ""]) -> None:
        """Nothing."""
        del model, gate


@dataclass(frozen=True)
class QKClip:
    """QK-clip per head.

    Attributes:
        max_logit: bound of a head's largest attention logit, tau in the paper; 100 there.
    """

    max_logit: float

    def __post_init__(self) -> None:
        if not torch.finfo(torch.float32).tiny <= self.max_logit <= torch.finfo(torch.float32).max:
            raise ConfigError(
                f"qkclip.max_logit={self.max_logit} is not a finite number above 0: 100 is the paper's; use "
                "qkclip=none for no QK-clip"
            )

    def meter(self, n_head: int) -> nn.Module:
        """A meter of `n_head` heads; an attention calls it with the queries and keys that enter its dot product."""
        return LogitMeter(n_head)

    def maxima(self, model: nn.Module) -> list[Tensor]:
        """Every head's largest logit of the step so far: of several ranks, each must clip by the largest of all."""
        return [meter.get_buffer("max_logit") for meter in model.modules() if isinstance(meter, LogitMeter)]

    @torch.no_grad()
    def __call__(self, model: nn.Module, gate: Bool[Tensor, ""]) -> None:
        """Scales `query` and `key` of every attention that has a meter, where `gate` is open; clears the meters.

        A head within the bound, or whose logits are not finite, keeps its bits: it is multiplied by exactly 1.
        """
        for attention in model.modules():
            if not isinstance(meter := getattr(attention, "meter", None), LogitMeter):
                continue
            seen = meter.get_buffer("max_logit")
            past = gate & torch.isfinite(seen) & (seen > self.max_logit)
            root = torch.where(past, self.max_logit / seen, 1.0).sqrt()
            for projection in (attention.get_submodule("query"), attention.get_submodule("key")):
                for parameter in projection.parameters():  # weight [width, n_embd] and bias [width], a head in a row
                    parameter.unflatten(0, (len(root), -1)).mul_(root.view(-1, *[1] * parameter.ndim))
            seen.zero_()
