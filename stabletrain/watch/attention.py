"""Attention: how large its logits are, how large they could become, and how spread out its weights.

    attn_logit_bound = max_i |q_i| * max_j |k_j| / sqrt(d)        attn_logit_max = max_ij q_i . k_j / sqrt(d)
    attn_entropy     = mean_i( -sum_j p_ij log p_ij ),  p = softmax of the logits, as the model computes it

Logits grow through the norms of queries and keys before a run diverges (arXiv 2309.14322, section 3.1: every run past
1e4 did); entropy falls towards 0 at the same time (arXiv 2303.06296: entropy collapse).

Watched is every module whose name ends in `dot_product` and whose forward takes (q, k, v), each `[batch, head, time,
dim]`, after whatever is done to them. It is causal, the last query aligned with the last key, unless it has an
attribute `is_causal` that is False; a softcap is read from its `softcap.attention_cap`.
"""

from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stabletrain.watch.places import place

SCORES = 2**24
"""Most attention logits held at once, unless one sample has more: 64 MiB in fp32."""


class Attended(NamedTuple):
    """What one attention was like; fp32, one value a head. Entropy in nats, mean over samples and queries."""

    bound: Tensor
    largest: Tensor
    entropy: Tensor


@torch.no_grad()
def attended(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    *,
    causal: bool,
    cap: float | None = None,
) -> Attended:
    """Bound, largest logit (before the cap) and entropy (after it) of each head, in fp32.

    Keys may have fewer heads, each shared by as many queries' heads as it takes.
    """
    with torch.autocast(q.device.type, enabled=False):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float()
        q = q.float() * q.shape[-1] ** -0.5
        bound = q.norm(dim=-1).amax(dim=(0, 2)) * k.norm(dim=-1).amax(dim=(0, 2))
        queries, keys = q.shape[-2], k.shape[-2]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1 + keys - queries)
        largest, entropy = [], []
        samples = max(1, SCORES // (q.shape[1] * queries * keys))
        for some_q, some_k in zip(q.split(samples), k.split(samples), strict=True):
            scores = some_q @ some_k.transpose(-2, -1)
            if cap is not None:
                uncapped = scores.masked_fill(hidden, -torch.inf) if causal else scores
                largest.append(uncapped.amax(dim=(0, 2, 3)))
                scores = cap * torch.tanh(scores / cap)
            if causal:
                scores.masked_fill_(hidden, -torch.inf)
            top = scores.amax(dim=-1, keepdim=True)
            if cap is None:
                largest.append(top.amax(dim=(0, 2, 3)))
            # H = log Z - sum p s, with scores shifted so that the largest is 0: no two large numbers are subtracted.
            scores.sub_(top)
            weights = scores.exp()
            z = weights.sum(dim=-1)
            if causal:
                scores.masked_fill_(hidden, 0.0)
            entropy.append((z.log() - weights.mul_(scores).sum(dim=-1) / z).mean(dim=-1).sum(dim=0))
        return Attended(bound, torch.stack(largest).amax(dim=0), torch.stack(entropy).sum(dim=0) / len(q))


@contextmanager
def listening(model: nn.Module) -> Generator[dict[str, Attended], None, None]:
    """Hears every attention within it; the hooks are gone afterwards, whatever happened.

    Yields:
        what each attention was like, by the name of its module, filled during the pass.
    """
    heard: dict[str, Attended] = {}
    handles = []

    def hear(name: str, module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        q, k, *_ = [*inputs, *(named[key] for key in "qkv" if key in named)]
        cap = getattr(getattr(module, "softcap", None), "attention_cap", None)
        heard[name] = attended(q, k, causal=getattr(module, "is_causal", True), cap=cap)

    try:
        for name, module in model.named_modules():
            if name.endswith("dot_product"):
                handles.append(module.register_forward_pre_hook(partial(hear, name), with_kwargs=True))
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def names(attentions: Iterable[str], blocks: dict[str, nn.Module]) -> dict[str, str]:
    """The name each attention's metrics go by: its block's, or where a block has several, its own module's."""
    where = {name: place(name, blocks) for name in attentions}
    several = {block for block, count in Counter(where.values()).items() if count > 1}
    return {name: name if block in several else block for name, block in where.items()}
