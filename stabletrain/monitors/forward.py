"""Statistics of activations, attention and output logits, measured in an isolated forward pass.

Activations, for each block: RMS, largest absolute value and distance from fp16's maximum (IEEE 754-2019, binary16).

    headroom = log2(65504 / absmax)    bits; below 0 the value does not fit into fp16

Attention, for each head: largest logit, its upper bound, and, for some heads and queries (see `attention_stats`),
entropy of the attention weights.

    attn_logit_bound = max_i |q_i| * max_j |k_j| / sqrt(d)        attn_logit_max = max_ij q_i . k_j / sqrt(d)
    attn_entropy     = mean_i( -sum_j p_ij log p_ij ),  p = softmax of the logits, as the model computes it

Before a run diverges, the norms of queries and keys grow, and logits with them (arXiv 2309.14322, section 3.1: every
run past 1e4 diverged). Entropy falls towards 0 at the same time (arXiv 2303.06296: entropy collapse).

An attention is any module whose name ends in `dot_product` and whose forward takes the final (q, k, v), each `[batch,
head, time, dim]`. It is causal, with the last query aligned to the last key, unless its attribute `is_causal` is
False. Its softcap is `softcap.attention_cap`.

Output logits: log Z, an offset that does not change the softmax and that z-loss keeps near 0 (PaLM, arXiv 2204.02311,
section 5). Late in training it may drift (arXiv 2309.14322, section 3.2).

    log Z_i = logsumexp(logits_i)

Normalisation layers: the smallest variance of an input (LayerNorm: over the width; BatchNorm: of a channel over the
batch; RMSNorm: the mean square), over eps. Near 1 the layer no longer normalises, and below it gradients grow by up to
1 / sqrt(eps).

    norm_variance = min_i Var(x_i) / eps
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from stabletrain.machine.compiling import uncompiled
from stabletrain.machine.determinism import rng_restored
from stabletrain.machine.recomputation import without_recomputation
from stabletrain.monitors.module_groups import place
from stabletrain.records import IGNORE_INDEX


@contextmanager
def isolated(model: nn.Module) -> Generator[None, None, None]:
    """Disables compilation and checkpointing inside the context, and restores every random generator on exit."""
    with rng_restored(model), uncompiled(), without_recomputation():
        yield


def isolated_forward(model: nn.Module, inputs: Any, parameters: dict[str, Tensor] | None = None) -> Any:
    """Returns the model's output without changing its buffers; `parameters` replace the model's own by name."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return torch.func.functional_call(model, buffers | (parameters or {}), (inputs,))


FP16_MAX = 65504.0


class ActivationStats(NamedTuple):
    """0-d fp32 tensors on their device, by block, in the order of the forward pass.

    Attributes:
        rms: root mean square of the block's output.
        absmax: largest absolute value among the outputs of the block and of every module in it.
    """

    rms: dict[str, Tensor]
    absmax: dict[str, Tensor]


@contextmanager
def recording_activations(blocks: dict[str, nn.Module]) -> Generator[ActivationStats, None, None]:
    """Records activation statistics of every forward pass inside the context; removes its hooks on exit.

    Yields:
        the statistics, filled during the pass. A block that is called several times reports its last RMS.
    """
    heard = ActivationStats({}, {})

    def record(name: str, whole: bool, module: nn.Module, inputs: Any, output: Any) -> None:
        values = first_tensor(output)
        if values is None:
            return
        largest = torch.stack(values.aminmax()).abs().amax().float()  # on a CPU, faster than an infinity norm
        seen = heard.absmax.get(name)
        heard.absmax[name] = largest if seen is None else torch.maximum(seen, largest)
        if whole:
            heard.rms.pop(name, None)  # so that the dict is ordered by the last call
            heard.rms[name] = torch.linalg.vector_norm(values, dtype=torch.float32) / values.numel() ** 0.5

    with ExitStack() as hooks:
        for name, block in blocks.items():
            for module in block.modules():
                hooks.enter_context(module.register_forward_hook(partial(record, name, module is block)))
        yield heard


def first_tensor(output: Any) -> Tensor | None:
    """Returns the first non-empty floating-point tensor in a module's output; None if there is none."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.numel() else None
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return next((found for part in output if (found := first_tensor(part)) is not None), None)
    return None


def headroom(absmax: float) -> float:
    """Returns log2(65504 / absmax), in bits: -inf for inf, NaN for NaN, inf for 0."""
    if absmax == 0.0:
        return math.inf
    return math.log2(FP16_MAX / absmax) if absmax != math.inf else -math.inf


@contextmanager
def recording_norms(blocks: dict[str, nn.Module]) -> Generator[dict[str, Tensor], None, None]:
    """Records the smallest variance over eps of each block's normalisation layers; removes its hooks on exit.

    A normalisation layer is any module with an attribute `eps` whose class name contains `Norm`.

    Yields:
        0-d fp32 tensors by block, filled during the pass.
    """
    heard: dict[str, Tensor] = {}

    def record(name: str, eps: float, module: nn.Module, inputs: tuple) -> None:
        values = first_tensor(inputs)
        if values is None:
            return
        least = smallest_variance(module, values) / eps
        heard[name] = torch.minimum(heard[name], least) if name in heard else least

    with ExitStack() as hooks:
        for name, block in blocks.items():
            for module in block.modules():
                eps = getattr(module, "eps", None)
                if "Norm" in type(module).__name__ and isinstance(eps, float) and eps > 0:
                    hooks.enter_context(module.register_forward_pre_hook(partial(record, name, eps)))
        yield heard


def smallest_variance(norm: Any, values: Tensor) -> Float[Tensor, ""]:
    """Returns the smallest variance, or mean square, by which the layer divides, in fp32."""
    values, kind = values.float(), type(norm).__name__
    if "BatchNorm" in kind:
        values = values.transpose(0, 1).flatten(1)
    elif "GroupNorm" in kind:
        values = values.unflatten(1, (norm.num_groups, -1)).flatten(2)
    elif "InstanceNorm" in kind:
        values = values.flatten(2)
    else:
        values = values.flatten(-len(getattr(norm, "normalized_shape", (1,))))
    if "RMS" in kind:
        return values.square().mean(dim=-1).amin()
    return values.var(dim=-1, correction=0).amin()


SCORES = 2**24
"""Maximum number of attention logits held at once, unless a single query has more: 64 MiB in fp32."""

SAMPLES, HEADS, QUERIES = 4, 4, 64
"""Maximum number of samples, heads and queries from which the entropy is computed."""


class AttentionStats(NamedTuple):
    """Statistics of one attention, in fp32.

    Attributes:
        bound: upper bound of every logit, `[head]`.
        largest: largest logit, `[head]`.
        entropy: in nats, averaged over the chosen samples and queries, `[chosen_head]`.
    """

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
    """Returns bound and largest logit (before the softcap) of each head, and entropy (after the softcap) of some.

    Bound and largest logit are exact. The entropy is computed from the first 4 samples, 4 evenly spaced heads and 64
    evenly spaced queries, the last one included, or from all of them where there are fewer. `kv_head` may be a divisor
    of `head`, as in grouped-query attention.
    """
    with torch.autocast(q.device.type, enabled=False):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float()
        q = q.float() * q.shape[-1] ** -0.5
        bound = q.norm(dim=-1).amax(dim=(0, 2)) * k.norm(dim=-1).amax(dim=(0, 2))
        queries, keys = q.shape[-2], k.shape[-2]
        last = torch.arange(keys - queries, keys, device=q.device)  # the last key that each query sees
        if not causal:
            last = last.new_full((queries,), keys - 1)
        largest = in_parts(largest_logit, q, k, last).amax(dim=(0, 2))
        heads, rows = evenly_spaced(q.shape[1], HEADS, q.device), evenly_spaced(queries, QUERIES, q.device)
        some_q, some_k = q[:SAMPLES, heads][:, :, rows], k[:SAMPLES, heads]
        entropy = in_parts(partial(row_entropy, cap=cap), some_q, some_k, last[rows])
        return AttentionStats(bound, largest, entropy.mean(dim=(0, 2)))


def evenly_spaced(count: int, most: int, device: torch.device) -> Int[Tensor, " chosen"]:
    """Returns at most `most` evenly spaced indices below `count`, the last one included."""
    chosen = min(count, most)
    return torch.arange(1, chosen + 1, device=device) * count // chosen - 1


def in_parts(
    measure: Callable[[Tensor, Tensor], Tensor],
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch head key dim"],
    last: Int[Tensor, " query"],
) -> Float[Tensor, "batch head query"]:
    """Returns `measure(logits, hidden)` of each query, with at most `SCORES` logits at a time.

    Args:
        measure: reduces logits `[n, row, key]` to `[n, row]`, where `hidden` is `[row, key]`; may overwrite the logits.
        q, k: their product is the logits.
        last: index of the last key that each query sees.
    """
    keys = torch.arange(k.shape[-2], device=k.device)
    rows = max(1, min(len(last), SCORES // len(keys)))
    together = max(1, SCORES // (rows * len(keys)))  # heads of samples
    measured = [
        torch.cat(
            [
                measure(part_q @ part_k.transpose(-2, -1), keys > seen[:, None])
                for part_q, seen in zip(some_q.split(rows, dim=1), last.split(rows), strict=True)
            ],
            dim=1,
        )
        for some_q, part_k in zip(q.flatten(0, 1).split(together), k.flatten(0, 1).split(together), strict=True)
    ]
    return torch.cat(measured).unflatten(0, q.shape[:2])


def largest_logit(logits: Float[Tensor, "n row key"], hidden: Bool[Tensor, "row key"]) -> Float[Tensor, "n row"]:
    """Returns the largest logit of each row that is not hidden; overwrites the logits."""
    return logits.masked_fill_(hidden, -torch.inf).amax(dim=-1)


def row_entropy(
    logits: Float[Tensor, "n row key"], hidden: Bool[Tensor, "row key"], *, cap: float | None
) -> Float[Tensor, "n row"]:
    """Returns the entropy of each row's softmax after the softcap, in nats; overwrites the logits."""
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits.masked_fill_(hidden, -torch.inf)
    # H = log Z - sum p s. The logits are shifted so that the largest is 0: no cancellation of large numbers.
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    weights = logits.exp()
    z = weights.sum(dim=-1)
    logits.masked_fill_(hidden, 0.0)
    return z.log() - weights.mul_(logits).sum(dim=-1) / z


@contextmanager
def recording_attention(model: nn.Module) -> Generator[dict[str, AttentionStats], None, None]:
    """Records statistics of every attention inside the context; removes its hooks on exit.

    Yields:
        statistics by module name, filled during the pass.
    """
    heard: dict[str, AttentionStats] = {}

    def record(name: str, module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        q, k, *_ = [*inputs, *(named[key] for key in "qkv" if key in named)]
        cap = getattr(getattr(module, "softcap", None), "attention_cap", None)
        heard[name] = attention_stats(q, k, causal=getattr(module, "is_causal", True), cap=cap)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name.endswith("dot_product"):
                hooks.enter_context(module.register_forward_pre_hook(partial(record, name), with_kwargs=True))
        yield heard


def block_names(attentions: Iterable[str], blocks: dict[str, nn.Module]) -> dict[str, str]:
    """Returns the metric name of each attention: its block's name, or its own if a block has several attentions."""
    where = {name: place(name, blocks) for name in attentions}
    several = {block for block, count in Counter(where.values()).items() if count > 1}
    return {name: name if block in several else block for name, block in where.items()}


VALUES = 2**24
"""Maximum number of logits upcast to fp32 at once: 64 MiB."""


@torch.no_grad()
def log_z(
    logits: Float[Tensor, "*rows classes"], targets: Int[Tensor, "*rows"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Returns mean and maximum of log Z over the rows whose target is not ignored, fp32; NaN and -inf without any."""
    rows = logits.flatten(0, -2)
    parts = rows.split(max(1, VALUES // rows.shape[-1]))
    values = torch.cat([torch.logsumexp(part.float(), dim=-1) for part in parts])
    valid = (targets != IGNORE_INDEX).flatten()
    mean = torch.where(valid, values, 0.0).sum() / valid.sum()
    return mean, torch.where(valid, values, -torch.inf).amax()
