"""Monitors of the forward pass: activations, attention and output logits, measured in an isolated pass.

Activations: how large each block's values are, and how far from fp16's end.

    headroom = log2(65504 / absmax)    bits; below 0 the value does not fit into fp16

Source of the format's maximum: IEEE 754-2019, binary16.

Attention: how large its logits are, how large they could become, and how spread out its weights.

    attn_logit_bound = max_i |q_i| * max_j |k_j| / sqrt(d)        attn_logit_max = max_ij q_i . k_j / sqrt(d)
    attn_entropy     = mean_i( -sum_j p_ij log p_ij ),  p = softmax of the logits, as the model computes it

Logits grow through the norms of queries and keys before a run diverges (arXiv 2309.14322, section 3.1: every run past
1e4 did); entropy falls towards 0 at the same time (arXiv 2303.06296: entropy collapse).

Watched is every module whose name ends in `dot_product` and whose forward takes (q, k, v), each `[batch, head, time,
dim]`, after whatever is done to them. It is causal, the last query aligned with the last key, unless it has an
attribute `is_causal` that is False; a softcap is read from its `softcap.attention_cap`.

Output logits: log Z, the offset that softmax cannot see and that z-loss holds near 0.

    log Z_i = logsumexp(logits_i)

Source: PaLM, arXiv 2204.02311, section 5; its late drift, arXiv 2309.14322, section 3.2.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from stabletrain.machine.compiling import uncompiled
from stabletrain.machine.determinism import rng_restored
from stabletrain.monitors.module_groups import place
from stabletrain.records import IGNORE_INDEX


@contextlib.contextmanager
def isolated(model: nn.Module) -> Generator[None, None, None]:
    """Within it passes are plain Python and random numbers are borrowed: afterwards every generator is as before."""
    with rng_restored(model), uncompiled():
        yield


def isolated_forward(model: nn.Module, inputs: Any, parameters: dict[str, Tensor] | None = None) -> Tensor:
    """The model's logits, computed with copies of its buffers and, where given, with `parameters` for its own."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return torch.func.functional_call(model, buffers | (parameters or {}), (inputs,))


FP16_MAX = 65504.0


class ActivationStats(NamedTuple):
    """0-d fp32 tensors on their device, by block, in the order in which blocks finish.

    Attributes:
        rms: root mean square of the block's output.
        absmax: largest absolute value among the outputs of the block and of every module in it.
    """

    rms: dict[str, Tensor]
    absmax: dict[str, Tensor]


@contextmanager
def recording_activations(blocks: dict[str, nn.Module]) -> Generator[ActivationStats, None, None]:
    """Hears every forward pass within it; the hooks are gone afterwards, whatever happened.

    Yields:
        what was heard, filled during the pass. A block that is called more than once leaves its last RMS.
    """
    heard = ActivationStats({}, {})
    handles = []

    def record(name: str, whole: bool, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        values = first_tensor(output)
        if values is None:
            return
        largest = torch.stack(values.aminmax()).abs().amax().float()  # 25 times as fast as the norm, on a CPU
        seen = heard.absmax.get(name)
        heard.absmax[name] = largest if seen is None else torch.maximum(seen, largest)
        if whole:
            heard.rms.pop(name, None)
            heard.rms[name] = torch.linalg.vector_norm(values, dtype=torch.float32) / values.numel() ** 0.5

    try:
        for name, block in blocks.items():
            for module in block.modules():
                handles.append(module.register_forward_hook(partial(record, name, module is block)))
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Tensor | None:
    """The first floating-point tensor with a value in it of what a module returned."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.numel() else None
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return next((found for part in output if (found := first_tensor(part)) is not None), None)
    return None


def headroom(absmax: float) -> float:
    """Bits left before fp16's end; -inf of an infinite value, NaN of NaN, inf of 0."""
    if absmax == 0.0:
        return math.inf
    return math.log2(FP16_MAX / absmax) if absmax != math.inf else -math.inf


SCORES = 2**24
"""Most attention logits held at once, unless one sample has more: 64 MiB in fp32."""


class AttentionStats(NamedTuple):
    """What one attention was like; fp32, one value a head. Entropy in nats, mean over samples and queries."""

    bound: Tensor
    largest: Tensor
    entropy: Tensor


@torch.no_grad()
def attention_stats(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    *,
    causal: bool,
    cap: float | None = None,
) -> AttentionStats:
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
        return AttentionStats(bound, torch.stack(largest).amax(dim=0), torch.stack(entropy).sum(dim=0) / len(q))


@contextmanager
def recording_attention(model: nn.Module) -> Generator[dict[str, AttentionStats], None, None]:
    """Hears every attention within it; the hooks are gone afterwards, whatever happened.

    Yields:
        what each attention was like, by the name of its module, filled during the pass.
    """
    heard: dict[str, AttentionStats] = {}
    handles = []

    def record(name: str, module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        q, k, *_ = [*inputs, *(named[key] for key in "qkv" if key in named)]
        cap = getattr(getattr(module, "softcap", None), "attention_cap", None)
        heard[name] = attention_stats(q, k, causal=getattr(module, "is_causal", True), cap=cap)

    try:
        for name, module in model.named_modules():
            if name.endswith("dot_product"):
                handles.append(module.register_forward_pre_hook(partial(record, name), with_kwargs=True))
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def block_names(attentions: Iterable[str], blocks: dict[str, nn.Module]) -> dict[str, str]:
    """The name each attention's metrics go by: its block's, or where a block has several, its own module's."""
    where = {name: place(name, blocks) for name in attentions}
    several = {block for block, count in Counter(where.values()).items() if count > 1}
    return {name: name if block in several else block for name, block in where.items()}


VALUES = 2**24
"""Most logits widened to fp32 at once: 64 MiB."""


@torch.no_grad()
def log_z(
    logits: Float[Tensor, "*rows classes"], targets: Int[Tensor, "*rows"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean and maximum of log Z, in fp32, over the rows whose target counts; NaN and -inf where none does."""
    rows = logits.flatten(0, -2)
    parts = rows.split(max(1, VALUES // rows.shape[-1]))
    values = torch.cat([torch.logsumexp(part.float(), dim=-1) for part in parts])
    valid = (targets != IGNORE_INDEX).flatten()
    mean = torch.where(valid, values, 0.0).sum() / valid.sum()
    return mean, torch.where(valid, values, -torch.inf).amax()
