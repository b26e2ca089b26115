"""The words that several rules share: fixes, and sentences about an incident's evidence.

A fix is an override that this run can take and does not have yet, or a change to a line of code.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stabletrain.forensics.diagnosis.evidence import (
    LR_TOO_HIGH,
    Evidence,
    decay_too_strong,
    has_cross_entropy,
    moved_beyond_lr,
)
from stabletrain.forensics.facts import Outcome
from stabletrain.forensics.probes.underflow import Underflow
from stabletrain.forensics.trace.origin import Origin

HEALTHY_MOVE = 0.01
"""Share of its own RMS that a typical parameter may move in a step."""

FAR_TOO_HIGH = 10.0
"""The optimizer's usual rate is the first fix for what updates bring about, from this many times it on."""

HIGH = 2.0
"""The same if the diagnosis says that the learning rate is too high."""

CUSTOMARY_STD = 0.02

EMPTY_BATCH = "skip an empty batch: drop_last=True in the loader, or another split or filter of the data"

MASKS = "join the masks with | and fill once: the sum of two of the lowest numbers is -inf"

FIXES = {
    "log_of_zero": "take log(x + eps), or log_softmax instead of log(softmax)",
    "log_of_negative": "keep the argument above 0, with softplus or clamp(min=eps)",
    "root_of_negative": "clamp the argument to at least 0 before the root",
    "division_by_zero": "add eps to the divisor, inside the root if there is one",
    "zero_over_zero": "add eps to the divisor; with torch.where, make the argument safe first (double where)",
    "zero_to_negative_power": "add eps inside the power",
    "exp_overflow": "subtract the largest value first, as softmax and logsumexp do",
    "inf_minus_inf": "keep both operands finite: one of them overflowed, or was set to Inf on purpose",
    "zero_times_inf": "keep the factor finite: mask with torch.where before the operation that overflows, not after it",
    "inf_over_inf": "scale both down first, as softmax does",
    "masked_row": "keep at least one entry of each row unmasked, or use a large negative number instead of -inf",
    "mean_of_nothing": "sum the items and divide by max(n, 1)",
    "too_few_frames": "zero_infinity=True in the CTC loss, or leave out samples with fewer frames than letters",
    "outside_domain": "clamp the argument to the inside of the domain, away from its ends",
    "singular_matrix": "add a small multiple of the identity",
    "masked_logits": "mask with a large negative number instead of -inf, or leave masked classes out of label "
    "smoothing and targets",
    "buffer": "keep what it writes into the buffer finite",
    "written": "the code writes this constant: keep it out of the loss and the gradients",
    "unwritten": "write to memory before reading it: use torch.zeros instead of torch.empty",
}
"""What to change at an operation that has no finite result, by `Origin.why`."""


def how_to_change(o: Origin) -> str:
    """What to change at the operation: an eps beside a root does not help its derivative, which divides by the root."""
    if o.direction == "backward" and o.node.startswith("Sqrt") and o.why in ("division_by_zero", "zero_over_zero"):
        return "add eps inside the root, (x + eps).sqrt(): outside of it, the derivative still divides by 0"
    return FIXES.get(o.why, "keep the argument inside the domain of the operation")


def wider_precision(e: Evidence) -> list[str]:
    """A precision with a larger range than fp16's; nothing if the run does not use fp16."""
    chosen = e.setting.choices.get("precision")
    if chosen == "auto" and e.origin is not None and e.origin.dtype == "float16":
        return ["precision=fp32"]  # auto takes fp16 only on a card without bf16
    return ["precision=bf16"] if chosen in ("fp16", "fp8") else []


def more_fp32_modules(e: Evidence) -> list[str]:
    """The override that runs the module in fp32, if autocast chooses the number format."""
    o = e.origin
    inside = o is not None and o.module not in ("", "objective")
    low = e.setting.choices.get("precision") in ("fp16", "bf16", "fp8", "auto")
    return [f"precision.fp32_modules=[{o.module}]"] if o is not None and inside and low else []


def logit_bounds(e: Evidence) -> list[str]:
    """Options that keep logits small, if the model and the objective support them and they are off."""
    able = {"qknorm": e.setting.has_attention, "softcap": e.setting.has_attention, "zloss": has_cross_entropy(e)}
    return [
        f"{group}={option}"
        for group, option in (("qknorm", "layernorm"), ("softcap", "gemma2"), ("zloss", "palm"))
        if e.setting.choices.get(group) == "none" and able[group]
    ]


def larger_loss_scale(e: Evidence, u: Underflow) -> list[str]:
    """The smallest loss scale that works, a faster return to it if overflows have lowered it, and a wider precision."""
    initial, interval = (e.setting.values.get(f"precision.{key}") for key in ("init_scale", "growth_interval"))
    auto = e.setting.choices.get("precision") == "auto"  # fp16 was chosen because the card has no bf16
    fix = [f"precision={'fp32' if auto else 'bf16'}"]
    if u.sufficient_scale is None or not isinstance(initial, int | float):
        return fix
    if u.sufficient_scale > initial:
        return [f"precision.init_scale={int(u.sufficient_scale)}", *fix]
    shorter = isinstance(interval, int) and interval > 1
    return [*fix, *([f"precision.growth_interval={max(1, interval // 10)}"] if shorter else [])]


def other_inits(e: Evidence) -> list[str]:
    """Common initialisations of ordinary size that differ from the run's."""
    chosen, std = e.setting.choices.get("init"), e.setting.values.get("init.std")
    smaller = isinstance(std, int | float) and std > CUSTOMARY_STD
    # gpt2 and small configure parts that only a GPT has.
    usual = ("gpt2", "small") if e.setting.has_attention else ("torch", "fan_in")
    fix = [f"init={name}" for name in usual if chosen != name]
    return [f"init.std={CUSTOMARY_STD}", *fix] if smaller and chosen == usual[0] else fix


def nonzero_init(e: Evidence, names: Sequence[str]) -> list[str]:
    """An initialisation without zeros for matrices that are all 0, so that gradients flow through them."""
    listed = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    if e.setting.choices.get("init") == "zero_residual":
        return [f"init={'gpt2' if e.setting.has_attention else 'torch'}"]
    return [f"initialise {listed} otherwise than with zeros: no gradient flows through them"]


def norm_clipping(e: Evidence) -> list[str]:
    """Clipping by the norm, if the run does not clip."""
    return ["clipping=norm"] if e.setting.choices.get("clipping") == "none" else []


def smaller_updates(e: Evidence) -> list[str]:
    """A learning rate or weight decay at which a typical parameter moves by a healthy share of its RMS per step."""
    if decay_too_strong(e):
        customary = 0.1 if e.drift is None or e.drift.adaptive else 1e-4
        return [f"optimizer.weight_decay={customary:g}"]
    rate = e.setting.values.get("optimizer.lr")
    if e.drift is None or not isinstance(rate, int | float) or e.drift.share <= LR_TOO_HIGH or moved_beyond_lr(e):
        return lower_lr(e)
    return [f"optimizer.lr={rate * HEALTHY_MOVE / e.drift.share:.1g}", *lower_lr(e)[:-1]]


def lower_lr(e: Evidence) -> list[str]:
    """A third of the learning rate; first twice the warmup, up to twice its length."""
    fix = []
    rate = e.setting.values.get("optimizer.lr")
    if isinstance(rate, int | float):
        fix.append(f"optimizer.lr={rate / 3:.2g}")
    elif isinstance(rate, list):  # of several optimizers
        fix.append(f"lower the learning rates to {', '.join(f'{each / 3:.2g}' for each in rate)}")
    if e.setting.warmup and e.reading.step <= 2 * e.setting.warmup:
        fix.insert(0, f"warmup.steps={2 * e.setting.warmup}")
    return fix


def usual_rate(values: Mapping[str, Any], usual: float | None, times: float = FAR_TOO_HIGH) -> float | None:
    """The optimizer's usual learning rate if the run's is at least so many times as high; else None.

    Args:
        values: the run's configuration by dotted key.
        usual: None if it is not known.
        times: how many.
    """
    rate = values.get("optimizer.lr")
    far = usual is not None and isinstance(rate, int | float) and rate >= times * usual
    return usual if far else None


def faster_second_moment(e: Evidence) -> list[str]:
    """An optimizer that clips updates when the second moment lags, or a smaller beta2."""
    betas = e.setting.values.get("optimizer.betas") or [0, 0]
    fix = ["optimizer=stable_adamw"] if e.setting.choices.get("optimizer") == "adamw" else []
    return [*fix, *([f"optimizer.betas=[{betas[0]},0.95]"] if betas[-1] > 0.95 else [])]


def tolerate_batch(e: Evidence) -> list[str]:
    """Options that tolerate a bad batch, unless the run has them already; no clipping makes a NaN harmless."""
    fix = [] if e.setting.choices.get("guard") in ("rollback", None) else ["guard=rollback"]
    clips = e.setting.choices.get("clipping") == "zclip"
    return [*fix, *(["clipping=zclip"] if e.kind == "spike" and not clips else [])]


def loss_and_norm(loss: float, grad_norm: float | None) -> str:
    """Loss and gradient norm in words; the norm may be unknown."""
    return f"loss {loss:.6g}" + ("" if grad_norm is None else f" and gradient norm {grad_norm:.6g}")


def replay_difference(e: Evidence, again: Outcome) -> str:
    """How the unchanged replay differs from the step. On several ranks, each rank's own part is compared."""
    assert again.loss is not None
    replayed, step = loss_and_norm(again.loss, again.grad_norm), loss_and_norm(e.reading.loss, e.reading.grad_norm)
    if e.part is None:
        return f"a replay of the step gives {replayed}; the step itself gave {step}"
    if not e.parts_normal:
        mine = loss_and_norm(e.part.loss, e.part.grad_norm)
        return f"a replay of rank {e.part.rank}'s part of the step gives {replayed}; in the step, it gave {mine}"
    own = "loss" if e.part.grad_norm is None else "loss and gradient norm"
    text = f"the step gave {step}, but every rank's own {own} was normal in the step and in a replay"
    if e.part.shard_norm is not None and not math.isfinite(e.part.shard_norm):
        text += (
            f". Rank {e.part.rank}'s shard of the summed gradient was not finite: the fault lies with this rank, with "
            "another one, or with the network between them"
        )
    return text


def lost_gradients(u: Underflow, kind: str) -> tuple[str, list[str]]:
    """How many gradient elements are 0 in a format, and in fp32; and a line for each of the worst parameters."""
    verdict = (
        f"{u.zeros:.0%} of all gradient elements are exactly 0 in {kind}, {u.in_fp32:.0%} in fp32; worst hit: "
        f"{', '.join(one.name for one in u.worst[:3])}"
    )
    return verdict, [
        f"{one.name}: {one.zeros:.1%} of its gradient elements are 0 in {kind}, {one.in_fp32:.1%} in fp32; "
        f"{kind} loses {one.lost:.1%} of those that are not 0 in fp32"
        for one in u.worst
    ]


def origin_sentence(e: Evidence) -> str:
    """The operation to blame and the reason; loss and gradient norm if there is no such operation."""
    o = e.origin
    if o is None:
        return f"{f'loss {e.reading.loss:.4g}, ' if e.loss_known else ''}gradient norm {e.reading.grad_norm:.4g}"
    return f"{o.op} in {o.module or 'the model'} ({o.direction}, {o.dtype}): {o.reason}"


def source_line(e: Evidence) -> str:
    """The source line to change; the module if the line is unknown."""
    o = e.origin
    return "the code" if o is None else o.source or o.module or "the model"


def origin_details(e: Evidence) -> list[str]:
    """Further lines about the operation, for a verdict that is `origin_sentence`."""
    o = e.origin
    lines = []
    if o is not None and o.should_have_been is not None:
        lines.append(f"in fp64, the largest value of {o.op} is {o.should_have_been:.6g}")
    if e.culprits and e.culprits.samples and not e.culprits.others_too:
        lines.append(f"samples of {batch_name(e)} that make the step fail: {e.culprits.samples[:8]}")
    return lines


def origin_lines(e: Evidence) -> list[str]:
    """Lines about the operation, for a verdict that does not mention it."""
    return [] if e.origin is None else [f"{origin_sentence(e)}, at {e.origin.source}", *origin_details(e)]


def chain_lines(e: Evidence) -> list[str]:
    """Magnitudes through the model, a line for each part."""
    chain = e.origin.chain if e.origin else ()
    return [f"{link.module} ({link.direction}, {link.dtype}): up to {link.absmax:.4g}" for link in chain]


def batch_name(e: Evidence) -> str:
    """The batch that was investigated, and that the indices of samples refer to."""
    return "the batch" if e.part is None else f"rank {e.part.rank}'s part of the batch"


def sample_name(sample: Mapping[str, Any], e: Evidence) -> str:
    """Names a sample by its source, id or index."""
    if "source" in sample:
        return f"{sample['source']}"
    if "id" in sample:
        return f"sample {sample['id']}"
    return "the batch" if sample["index"] is None else f"sample {sample['index']} of {batch_name(e)}"
