"""QK-clip: after an update, scales down the query and key projections of heads whose attention logits are too large.

    W_q, W_k <- sqrt(gamma) W_q, sqrt(gamma) W_k       gamma = min(1, max_logit / S_max),  per head

S_max is the head's largest attention logit q·k / sqrt(d) in the forward passes of the step, on all ranks. The scaling
reduces the logits by gamma, so the next step's start from the bound; attention itself is unchanged. Keys that several
heads share (`model.n_kv_head`) stay as they are, and W_q takes gamma, as Kimi K2 does where heads share a part of their
keys: so a head within the bound is not touched for another's sake. Source: Kimi K2, arXiv 2507.20534, section 2.1
(there with Muon; works with any optimizer).

A kind of QK-clip creates a meter for each attention, and is called with the model after the update.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.parallel.owners import own_rows
from stabletrain.records import LOGITS_AT_ONCE
from stabletrain.stability.after_update import AfterUpdate

QUERY_BLOCK = 128
"""The queries measured at once are a multiple of this."""


class NoMeter(nn.Module):
    """Measures nothing."""

    def forward(self, q: Tensor, k: Tensor) -> None:
        """Does nothing."""


class LogitMeter(nn.Module):
    """Records each head's largest causal attention logit since the last reset; only in training mode.

    Costs at most one more matrix product per attention, and temporary memory for the fp32 scores of as many queries as
    have `LOGITS_AT_ONCE` of them, but at least 128: `[batch, head, query, key]` never exists for long sequences.
    """

    def __init__(self, n_head: int) -> None:
        super().__init__()
        # Not persistent: between steps it is 0, so checkpoints do not need it.
        self.register_buffer("max_logit", torch.zeros(n_head), persistent=False)

    @torch.no_grad()
    def forward(self, q: Float[Tensor, "batch head time dim"], k: Float[Tensor, "batch kv_head time dim"]) -> None:
        """Updates the maxima with this micro-batch's logits; `kv_head` divides `head`."""
        if not self.training:
            return
        seen, found = self.get_buffer("max_logit"), []
        batch, head, time, dim = q.shape
        rows = max(QUERY_BLOCK, LOGITS_AT_ONCE // max(batch * head * time, 1) // QUERY_BLOCK * QUERY_BLOCK)
        with torch.autocast(q.device.type, enabled=False):
            keys = k.float().transpose(-2, -1)
            if k.shape[1] < head:
                keys = keys.repeat_interleave(head // k.shape[1], dim=1)
            for start in range(0, time, rows):
                some = q[:, :, start : start + rows].float() * dim**-0.5
                end = start + some.shape[2]
                scores = some @ keys[..., :end]  # later keys are in the future of all these queries
                future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + start)
                found.append(scores.masked_fill_(future, 0.0).amax(dim=(0, 2, 3)))
        seen.copy_(torch.stack([seen, *found]).amax(dim=0) if len(found) > 1 else torch.maximum(seen, found[0]))


@dataclass(frozen=True)
class NoQKClip(AfterUpdate):
    """No QK-clip. Base class of all kinds, and what each must offer beside `AfterUpdate`."""

    def meter(self, n_head: int) -> nn.Module:
        """Returns the module that every attention of `n_head` heads calls with its queries and keys.

        This one measures nothing.
        """
        return NoMeter()


@dataclass(frozen=True)
class QKClip(NoQKClip):
    """QK-clip per head.

    Attributes:
        max_logit: bound on each head's largest attention logit, tau in the paper; 100 there.
    """

    max_logit: float

    def __post_init__(self) -> None:
        if not torch.finfo(torch.float32).tiny <= self.max_logit <= torch.finfo(torch.float32).max:
            raise ConfigError(
                f"qkclip.max_logit={self.max_logit} is not a finite number above 0: the paper uses 100; use "
                "qkclip=none for no QK-clip"
            )

    def meter(self, n_head: int) -> nn.Module:
        """Returns a meter of `n_head` heads."""
        return LogitMeter(n_head)

    def maxima(self, model: nn.Module) -> list[Tensor]:
        """Returns the maxima of every meter."""
        return [meter.get_buffer("max_logit") for meter in model.modules() if isinstance(meter, LogitMeter)]

    @torch.no_grad()
    def __call__(self, model: nn.Module, gate: Bool[Tensor, ""]) -> None:
        """Scales `query` and `key` of every attention that has a meter, if `gate` is open; resets the meters.

        With shared keys, `query` alone is scaled, by the whole factor.

        A head within the bound, or with non-finite logits, stays bitwise unchanged: it is multiplied by exactly 1.
        """
        for attention in model.modules():
            if not isinstance(meter := getattr(attention, "meter", None), LogitMeter):
                continue
            seen = meter.get_buffer("max_logit")
            past = gate & torch.isfinite(seen) & (seen > self.max_logit)
            factor = torch.where(past, self.max_logit / seen, 1.0)
            # Queries and keys each take the root, so that their product takes the whole factor.
            names, factor = (("query",), factor) if shares_keys(attention) else (("query", "key"), factor.sqrt())
            # weight [width, n_embd] and bias [width]: head by head
            scaled = [p for name in names for p in attention.get_submodule(name).parameters()]
            factors = {rows: factor.repeat_interleave(rows // len(factor)) for rows in {len(p) for p in scaled}}
            for parameter in scaled:
                scale_rows_(parameter, factors[len(parameter)])
            seen.zero_()


def scale_rows_(parameter: Any, factors: Float[Tensor, " rows"]) -> None:
    """Multiplies each row by its factor; of a sharded parameter, the rows that this rank has."""
    rows = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    rows.mul_(factors[own_rows(parameter)].view(-1, *[1] * (rows.ndim - 1)))


def shares_keys(attention: Any) -> bool:
    """Returns whether several heads of an attention share a head of keys; one of a plug-in may not say so."""
    return getattr(attention, "n_kv_head", None) not in (None, getattr(attention, "n_head", None))
