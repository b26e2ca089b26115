"""Alarms on exploding and vanishing activations and gradients; each names the layers in one line.

| kind | condition |
|---|---|
| explosion | activations (forward) or gradients (backward) grow by more than 1e3 from one block to a later one |
| vanishing | they shrink below 1e-4; or a block's gradients are below Adam's eps or, in fp16, nearly all 0 |

Ratios compare root mean squares of any two blocks, so slow growth over many blocks counts like a jump (arXiv
1211.5063; Glorot and Bengio 2010). The thresholds are this project's own: wide enough for residual streams, which grow
with depth and training. A block whose values are exactly 0 is left out, because zero-initialised branches start so.
"""

import math
from collections.abc import Iterator, Mapping

EXPLODES = 1e3
VANISHES = 1e-4
ZERO_SHARE = 0.9
"""Share of a block's fp16 gradients that are exactly 0, above which they count as underflowed."""

LOGIT_LIMIT = 1e4
"""Attention logit above which every run of arXiv 2309.14322 diverged."""

INIT = "choose another init, or put norms or residual connections between the blocks"


def extremes(sizes: Mapping[str, float]) -> tuple[tuple[str, str, float], tuple[str, str, float]] | None:
    """Returns the largest and the smallest ratio of an entry to an earlier one, each as (from, to, ratio).

    Ignores entries that are 0 or not finite; None if fewer than two are left.
    """
    known = [(name, size) for name, size in sizes.items() if math.isfinite(size) and size > 0]
    if len(known) < 2:
        return None
    rise = fall = (known[0][0], known[1][0], known[1][1] / known[0][1])
    lowest = highest = known[0]
    for name, size in known[1:]:
        rise = max(rise, (lowest[0], name, size / lowest[1]), key=lambda found: found[2])
        fall = min(fall, (highest[0], name, size / highest[1]), key=lambda found: found[2])
        lowest, highest = min(lowest, (name, size), key=lambda e: e[1]), max(highest, (name, size), key=lambda e: e[1])
    return rise, fall


def passes(
    activations: Mapping[str, float], gradients: Mapping[str, float]
) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Yields what the sizes are of, in which pass, and the sizes in the order of that pass."""
    yield "activations", "", activations
    yield "gradients", " in the backward pass", dict([*gradients.items()][::-1])


def explosion(activations: Mapping[str, float], gradients: Mapping[str, float]) -> str | None:
    """Returns the text of the explosion alarm; None if there is none.

    Args:
        activations: root mean square of each block's output, in the order of the forward pass.
        gradients: root mean square of each block's gradients, in the same order.
    """
    for what, where, sizes in passes(activations, gradients):
        if (found := extremes(sizes)) and found[0][2] > EXPLODES:
            start, end, ratio = found[0]
            return f"explosion: {what} grow {ratio:.1e} times{where} from {start} to {end}; {INIT}"
    return None


def vanishing(activations: Mapping[str, float], gradients: Mapping[str, float]) -> str | None:
    """Returns the text of the vanishing alarm; None if there is none. Arguments are those of `explosion`."""
    for what, where, sizes in passes(activations, gradients):
        if (found := extremes(sizes)) and found[1][2] < VANISHES:
            start, end, ratio = found[1]
            return f"vanishing: {what} shrink to {ratio:.1e} of their size{where} from {start} to {end}; {INIT}"
    return None


def starving(
    over_eps: Mapping[str, float], zero_shares: Mapping[str, float], *, fp16: bool, fp8: bool = False
) -> str | None:
    """Returns the text of an alarm on gradients that are too small; None if there is none.

    The caller raises the alarm only after several inspections in a row, because gradients can be this small in the
    first steps of a healthy run.

    Args:
        over_eps: ratio of each block's gradient RMS to Adam's eps, for blocks that have an eps.
        zero_shares: share of each block's gradients that are exactly 0.
        fp16, fp8: whether the forward pass runs in float16, or its linear layers in fp8.
    """
    gone = [name for name, share in zero_shares.items() if share > ZERO_SHARE]
    if fp16 and gone:
        return (
            f"vanishing: more than {ZERO_SHARE:.0%} of the gradients of {listed(gone)} are exactly 0, below the "
            "smallest float16; use precision=bf16, or raise precision.init_scale"
        )
    if fp8 and gone:
        return (
            f"vanishing: more than {ZERO_SHARE:.0%} of the gradients of {listed(gone)} are exactly 0: fp8 may have "
            "flushed them; use precision=bf16, or name the modules in precision.bf16_modules"
        )
    low = [name for name, ratio in over_eps.items() if ratio < 1]
    if low:
        return (
            f"vanishing: gradients of {listed(low)} are below Adam's eps, which then dominates the update's "
            f"denominator; lower optimizer.eps, or {INIT}"
        )
    return None


def attention(largest: Mapping[str, float]) -> str | None:
    """Returns the text of the alarm if an attention logit exceeds 1e4; None otherwise."""
    high = {name: value for name, value in largest.items() if value > LOGIT_LIMIT}
    if not high:
        return None
    return (
        f"attention logits of {listed([*high])} reach {max(high.values()):.1e}: runs that passed {LOGIT_LIMIT:.0e} "
        "diverged (arXiv 2309.14322); use qknorm=layernorm or qkclip=kimi, or lower optimizer.lr"
    )


def listed(names: list[str]) -> str:
    """Returns the first three names and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
