"""Rules: from the evidence to the cause of an incident, and to its fix.

Each rule is a function of the evidence alone. `RULES` lists them in the order in which they are asked; the first that
holds gives the cause. A rule that may give a cause under several conditions has a name of its own (`bad_inputs` gives
`bad_batch`, `rushed_updates` gives `lr_too_high`, `overlong_updates` gives `optimizer_staleness`, `overflow` gives
`unsafe_op`). The causes are listed in `cause_table.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from stabletrain.forensics.diagnosis.evidence import (
    DIVISIONS,
    FIRST_STEPS,
    OVERLONG,
    Evidence,
    absurd_at_first,
    beside,
    beyond_lr,
    chain_lines,
    is_spread,
    named,
    narrow,
    no_result,
    origin_lines,
    origin_sentence,
    place,
    rushed,
    too_bright,
    wild,
)
from stabletrain.forensics.diagnosis.fixes import (
    FIXES,
    larger_scale,
    lower_lr,
    more_fp32_modules,
    other_weights,
    past_it,
    slower,
    structure,
    wider,
    younger_moments,
)
from stabletrain.forensics.probes.samples import describe

SATURATED = 1e2
ATTENTION = 1e3
LOST = 1e4
"""Attention logits that make a softmax one-hot; that the field is alarmed at; past which every run of arXiv 2309.14322
diverged."""

RISING = 1.02
"""Growth a step that is no chance: the batch is the same, so only the weights make it."""

LOG_Z = 30.0
GROWN = 2.0
STALE = 5.0


@dataclass(frozen=True)
class Diagnosis:
    """What it was, and what to do.

    Attributes:
        cause: an id of the table above.
        confidence: in [0, 1].
        verdict: one sentence.
        fix: Hydra overrides or actions, best first.
        evidence: lines that a person can read.
    """

    cause: str
    confidence: float
    verdict: str
    fix: list[str]
    evidence: list[str]


def poison_input(e: Evidence) -> Diagnosis | None:
    """The batch holds what is no number."""
    bad = [sample for sample in e.samples if sample["fault"] == "input"]
    if not bad:
        return None
    return Diagnosis("poison_input", 0.99, describe(bad), [f"clean {named(each)}" for each in bad], [])


def bad_label(e: Evidence) -> Diagnosis | None:
    """A label that is no class, or none that counts."""
    bad = [sample for sample in e.samples if sample["fault"] != "input"]
    if bad:
        return Diagnosis("bad_label", 0.99, describe(bad), [f"mend {named(each)}" for each in bad], [])
    o = e.origin
    if o is None or o.why != "mean_of_nothing" or "nll" not in o.op:  # of anything but targets it is unsafe
        return None
    return Diagnosis("bad_label", 0.9, origin_sentence(e), [f"{place(e)}: divide by max(n, 1)"], beside(e))


def corrupt_state(e: Evidence) -> Diagnosis | None:
    """The state was bad before the step ran."""
    bad = [d for d in e.damage if not d.large or not rushed(e)]
    if not bad:
        return None
    first = bad[0]
    verdict = f"{first.what} {first.name} was bad before the step: {first.words}"
    fix = ["resume=<run folder> (the last healthy checkpoint)", "check the machine's memory, if it comes again"]
    return Diagnosis("corrupt_state", 0.95, verdict, fix, [f"{d.what} {d.name}: {d.words}" for d in bad[:8]])


def hardware_fault(e: Evidence) -> Diagnosis | None:
    """The same step, run again, is another, and run again once more it is that other."""
    again = e.outcomes.get("same")
    if again is None or again.finite is None or again.bitwise_equal_to_reading is not False:
        return None
    cured = again.finite if e.kind == "nonfinite" else e.setting.deterministic and e.normal("same")
    if not e.repeats or not cured:  # a spike that is there again in other bits is no accident of the machine
        return None
    verdict = (
        f"the same step run again gives loss {again.loss:.6g} and gradient norm {again.grad_norm:.6g}; "
        f"the first time it was {e.reading.loss:.6g} and {e.reading.grad_norm:.6g}"
    )
    confidence = 0.95 if e.setting.deterministic else 0.6
    return Diagnosis("hardware_fault", confidence, verdict, ["run it again on another device; check this one"], [])


def bad_inputs(e: Evidence) -> Diagnosis | None:
    """Finite inputs that are none of this data."""
    if not too_bright(e) or e.largest_input is None:
        return None
    loud = e.largest_input
    sizes = f"a value of {loud.largest:.4g}; the largest of another batch is {loud.elsewhere:.4g}"
    verdict = f"{named(loud.sample)} holds {sizes}"
    return Diagnosis("bad_batch", 0.9, verdict, [f"clean {named(loud.sample)}", *past_it(e)], origin_lines(e))


def loss_scale_collapse(e: Evidence) -> Diagnosis | None:
    """The loss scale has fallen to its floor."""
    floor = e.setting.values.get("precision.min_scale")
    scaled = e.setting.choices.get("precision") in ("fp16", "auto") and isinstance(floor, int | float)
    at_floor = scaled and e.kind == "nonfinite" and e.reading.loss_scale <= floor and math.isfinite(e.reading.loss)
    narrow_only = e.finite("fp32") is True and e.origin is not None and e.origin.dtype == "float16"
    if not (at_floor and narrow_only and e.origin and e.origin.direction == "backward"):
        return None
    return Diagnosis(
        "loss_scale_collapse",
        0.9,
        f"the loss scale has fallen to {e.reading.loss_scale:g}: gradients overflow fp16 at every scale",
        [*wider(e), *more_fp32_modules(e), *structure(e)],
        origin_lines(e),
    )


def fp16_underflow(e: Evidence) -> Diagnosis | None:
    """Gradients below what fp16 can hold, which fp32 can."""
    u = e.underflow
    if u is None or not u.real:
        return None
    verdict = (
        f"at loss scale {u.loss_scale:g} fp16 makes {u.zeros:.0%} of all gradients exactly 0, fp32 {u.in_fp32:.0%}; "
        f"worst hit: {', '.join(one.name for one in u.worst[:3])}"
    )
    lines = [
        f"{one.name}: {one.zeros:.1%} of its gradients are 0, in fp32 {one.in_fp32:.1%}; of those that are not 0 there "
        f"{one.lost:.1%} are lost"
        for one in u.worst
    ]
    tried = "no larger loss scale keeps them without an overflow" if u.cure is None else f"at {u.cure:g} they are kept"
    return Diagnosis("fp16_underflow", 0.95, verdict, larger_scale(e, u), [*lines, tried])


def zero_variance_norm(e: Evidence) -> Diagnosis | None:
    """A normalisation divides by a spread of 0."""
    o = e.origin
    if o is None or wild(e):
        return None
    if o.why not in ("zero_variance", "variance_of_one") and not (o.why in DIVISIONS and is_spread([o.op, *e.makers])):
        return None
    fix = [f"add eps >= 1e-6 inside the root of {place(e)}, and compute it in fp32"]
    return Diagnosis("zero_variance_norm", 0.9, origin_sentence(e), fix + more_fp32_modules(e), beside(e))


def fp16_overflow(e: Evidence) -> Diagnosis | None:
    """Past 65504, which fp16 cannot hold."""
    o = e.origin
    if o is None or o.dtype != "float16" or not (o.why in ("overflow", "exp_overflow") or narrow(e)):
        return None
    if (o.in_fp32 is not None and not math.isfinite(o.in_fp32)) or wild(e) or absurd_at_first(e):
        return None
    if e.finite("fp32") is False:  # without autocast it is fp16 still: the code's own cast
        fix = [f"compute it in fp32: {place(e)} casts to float16 by itself"]
    else:
        fix = [*wider(e), *more_fp32_modules(e), *structure(e)]
    return Diagnosis("fp16_overflow", 0.95, origin_sentence(e), fix, beside(e))


def unsafe_op(e: Evidence) -> Diagnosis | None:
    """An operation without a finite result for these values."""
    o = e.origin
    if o is None or wild(e) or o.why in ("overflow", "given") or (o.why == "unknown" and not no_result(e)):
        return None
    how = FIXES.get(o.why, "keep its argument inside its domain")
    sure = 0.7 if o.why == "unknown" else 0.9
    return Diagnosis("unsafe_op", sure, origin_sentence(e), [f"{place(e)}: {how}"], beside(e))


def bad_init(e: Evidence) -> Diagnosis | None:
    """Nothing has been learnt yet."""
    if e.reading.step > FIRST_STEPS or e.normal("fresh_batch") or e.normal("older_state") or rushed(e):
        return None
    verdict = f"{origin_sentence(e)} in step {e.reading.step}"
    return Diagnosis("bad_init", 0.8, verdict, [*other_weights(e), *lower_lr(e)], beside(e) + chain_lines(e))


def rushed_updates(e: Evidence) -> Diagnosis | None:
    """All weights have moved further than any healthy training moves them."""
    if not rushed(e) or e.normal("fresh_batch") or e.drift is None:
        return None
    d = e.drift
    verdict = (
        f"in {d.steps} steps a typical parameter has moved by {d.moved:.3g}, {d.share * d.steps:.3g} times its own size"
    )
    fix = slower(e)
    if beyond_lr(e):
        verdict += f", further than lr={e.reading.lr:.3g} takes it: one update was far longer"
        fix = ["guard=rollback", *fix] if e.setting.choices.get("guard") not in ("rollback", None) else fix
    return Diagnosis("lr_too_high", 0.85, verdict, fix, chain_lines(e))


def attention_logit_growth(e: Evidence) -> Diagnosis | None:
    """Queries and keys have grown."""
    name = "attn_logit_max" if e.size("attn_logit_max") > 0 else "softmax_max"  # whose attention nobody listens to
    largest, grown = e.size(name), e.grown(name)
    others = 1.0 if e.drift is None else e.drift.grown  # logits are products of two weights
    slow = RISING ** (1 if e.drift is None else e.drift.steps)
    enough = 1.0 if largest > LOST else min(GROWN, slow) if largest > ATTENTION else GROWN
    if not largest > SATURATED or not grown > enough * max(others, 1.0) ** 2:
        return None
    fix = [
        f"{group}={option}"
        for group, option in (("qknorm", "layernorm"), ("qkclip", "kimi"))
        if e.setting.has_attention and e.setting.choices.get(group) == "none"
    ]
    fix = fix or ["normalise queries and keys before their product (QK-norm), or cap it"]
    verdict = f"attention logits have reached {largest:.4g}, {grown:.3g} times those of before"
    return Diagnosis("attention_logit_growth", 0.85, verdict, [*fix, *lower_lr(e)], origin_lines(e))


def output_logit_drift(e: Evidence) -> Diagnosis | None:
    """The softmax's free offset has wandered off."""
    drift = abs(e.size("log_z_mean"))
    since = drift - abs(e.before.get("monitors/log_z_mean", math.nan))
    torn = e.drift is not None and e.drift.grown > GROWN
    if torn or not drift > LOG_Z or not since > min(LOG_Z / 2, 0.1 * drift):
        return None
    fix = ["zloss=palm"] if e.setting.choices.get("zloss") == "none" else []
    return Diagnosis(
        "output_logit_drift", 0.8, f"mean log Z is {e.size('log_z_mean'):.4g}", [*fix, *lower_lr(e)], origin_lines(e)
    )


def bad_batch(e: Evidence) -> Diagnosis | None:
    """This batch alone."""
    if not e.normal("fresh_batch"):
        return None
    who = "" if e.culprits is None or not e.culprits.samples else f" (samples {e.culprits.samples[:8]})"
    sure = 0.9 if e.normal("older_state") is False else 0.7
    verdict = f"another batch on the same weights is normal, so it is this batch{who}"
    fix = ["look at the batch: batch.safetensors beside this page", *past_it(e)]
    return Diagnosis("bad_batch", sure, verdict, fix, origin_lines(e))


def overflow(e: Evidence) -> Diagnosis | None:
    """A number past the end of a format as wide as fp32, of weights that are as they should be."""
    o = e.origin
    if o is None or o.why != "overflow" or o.dtype == "float16" or (e.drift is not None and e.drift.grown > GROWN):
        return None
    fix = f"{place(e)}: scale its inputs down, or work with logarithms"
    return Diagnosis("unsafe_op", 0.6, origin_sentence(e), [fix, *lower_lr(e)], beside(e) + chain_lines(e))


def overlong_updates(e: Evidence) -> Diagnosis | None:
    """Updates have been longer than the learning rate, which only a second moment of another age makes them."""
    if not e.overlong > OVERLONG or rushed(e) or e.normal("older_state") is False:
        return None
    verdict = f"updates have been up to {e.overlong:.3g} learning rates long: RMS(m / sqrt(v)) is at most about 1"
    return Diagnosis("optimizer_staleness", 0.8, verdict, [*younger_moments(e), *lower_lr(e)], origin_lines(e))


def optimizer_staleness(e: Evidence) -> Diagnosis | None:
    """Adam's second moment is older than the gradients."""
    if not e.staleness > STALE or e.normal("older_state") is False or e.normal("fresh_batch"):
        return None
    verdict = f"RMS(g / sqrt(v)) is {e.staleness:.3g}, and should be near 1"
    return Diagnosis("optimizer_staleness", 0.7, verdict, [*younger_moments(e), *lower_lr(e)], [])


def lr_too_high(e: Evidence) -> Diagnosis | None:
    """The weights have gone wrong, and nothing else is to blame."""
    if e.normal("fresh_batch") is not False or e.normal("fp32") is not False:
        return None
    sure = 0.8 if e.normal("older_state") else 0.6
    return Diagnosis("lr_too_high", sure, "every batch fails on these weights, in fp32 too", slower(e), chain_lines(e))


def unknown(e: Evidence) -> Diagnosis:
    """None of the above."""
    return Diagnosis("unknown", 0.0, origin_sentence(e), [*wider(e), *lower_lr(e)], beside(e) + chain_lines(e))


RULES: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    # What is read off directly: the batch's values, the state, the machine. Nothing else can explain these away.
    poison_input,
    bad_label,
    corrupt_state,
    hardware_fault,
    bad_inputs,
    # The number format. Before the weights, because fp16 overflows with weights that are fine in bf16.
    loss_scale_collapse,
    fp16_underflow,
    zero_variance_norm,
    fp16_overflow,
    unsafe_op,
    # The weights: initial ones first, then what updates have made of them, the specific before the general.
    bad_init,
    rushed_updates,
    overlong_updates,
    attention_logit_growth,
    output_logit_drift,
    # What only replays tell apart: this batch, or this state with every batch.
    bad_batch,
    overflow,
    optimizer_staleness,
    lr_too_high,
)


def diagnose(evidence: Evidence) -> Diagnosis:
    """The cause by the first rule that holds."""
    return next((found for rule in RULES if (found := rule(evidence)) is not None), unknown(evidence))
