"""Rules that derive the cause of an incident, and its fixes, from the evidence.

Each rule is a function of the evidence alone: it returns a `Diagnosis`, or None if it does not hold. `RULES` lists them
in order, and `diagnose.py` applies them: the first rule that holds gives the cause. A second rule for the same cause
has its own name: `bad_inputs` gives `bad_batch`, `updates_too_large` gives `lr_too_high`, `updates_too_long` gives
`optimizer_staleness`, `overflow` gives `unsafe_op`, and `finite_when_rerun` gives `hardware_fault`. `cause_table.py`
lists all causes.
"""

import math
from collections.abc import Callable

from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.evidence import (
    DIVISIONS,
    FIRST_STEPS,
    MAX_UPDATE_LENGTH,
    Evidence,
    adds_masks,
    finite_in_fp32,
    first_loss_too_large,
    has_cross_entropy,
    has_input_outlier,
    has_no_rows,
    is_spread,
    loss_has_risen,
    moved_beyond_lr,
    moved_first,
    moved_too_far,
    no_finite_result,
    outliers,
    reads_huge_values,
    weights_ruined,
)
from stabletrain.forensics.diagnosis.fp8_causes import fp8_overflow, fp8_underflow
from stabletrain.forensics.diagnosis.update_causes import bad_setting, finite_when_rerun, unsafe_optimizer
from stabletrain.forensics.diagnosis.wording import (
    EMPTY_BATCH,
    FIXES,
    MASKS,
    batch_name,
    chain_lines,
    faster_second_moment,
    how_to_change,
    larger_loss_scale,
    logit_bounds,
    lost_gradients,
    lower_lr,
    more_fp32_modules,
    origin_details,
    origin_lines,
    origin_sentence,
    other_inits,
    replay_difference,
    sample_name,
    smaller_updates,
    source_line,
    tolerate_batch,
    wider_precision,
)
from stabletrain.forensics.probes.samples import describe
from stabletrain.guard.checks.neighbours import Blame
from stabletrain.guard.checks.recheck import Finding

ONE_HOT_LOGIT = 1e2
LARGE_LOGIT = 1e3
DIVERGING_LOGIT = 1e4
"""Attention logits: at 1e2 a softmax is one-hot, above 1e3 growth is alarming, and every run of arXiv 2309.14322 that
exceeded 1e4 diverged.
"""

TREND_PER_STEP = 1.02
"""Growth per step that counts as a trend: both sizes are measured on the same batch, so only the weights differ."""

MAX_LOG_Z = 30.0
"""Distance of the mean log Z from 0, in nats, above which the output logits have drifted."""

MIN_GROWTH = 2.0
"""Growth of a quantity since the older state that is not routine."""

STALE_RATIO = 5.0
"""RMS(g / sqrt(v)) above which Adam's second moment is out of date."""


def poison_input(e: Evidence) -> Diagnosis | None:
    """NaN, Inf or an id out of range in the inputs."""
    bad = [sample for sample in e.samples if sample["fault"] == "input"]
    if not bad:
        return None
    return Diagnosis(
        "poison_input", 0.99, describe(bad, batch_name(e)), [f"clean {sample_name(each, e)}" for each in bad], []
    )


def bad_label(e: Evidence) -> Diagnosis | None:
    """A label out of range, an empty batch, or a loss averaged over no target."""
    bad = [sample for sample in e.samples if sample["fault"] != "input"]
    if bad:
        fix = [EMPTY_BATCH if each["fault"] == "empty" else f"correct {sample_name(each, e)}" for each in bad]
        return Diagnosis("bad_label", 0.99, describe(bad, batch_name(e)), [*dict.fromkeys(fix)], [])
    o = e.origin
    if o is None or o.why != "mean_of_nothing" or "nll" not in o.op:  # any other empty mean is an unsafe_op
        return None
    how = EMPTY_BATCH if has_no_rows(o) else FIXES[o.why]
    return Diagnosis("bad_label", 0.9, origin_sentence(e), [f"{source_line(e)}: {how}"], origin_details(e))


def uninitialised(e: Evidence) -> Diagnosis | None:
    """A weight or buffer that is not finite in the first step: no update has changed it."""
    bad = [d for d in e.damage if d.what in ("parameter", "buffer") and not d.large]
    if e.kind == "state" or e.reading.step != 1 or not bad:
        return None
    names = ", ".join(d.name for d in bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    verdict = f"{bad[0].what} {bad[0].name}: {bad[0].words} before the first step, so it was never initialised"
    fix = [f"initialise {names}: torch.empty only reserves memory; use torch.zeros or torch.nn.init"]
    fix.append("if the weights were loaded from a file, load another one: this one holds NaN or Inf")
    return Diagnosis("uninitialised", 0.95, verdict, fix, [f"{d.what} {d.name}: {d.words}" for d in bad[1:8]])


def corrupt_state(e: Evidence) -> Diagnosis | None:
    """Weights, buffers or moments were corrupt before the step."""
    if e.kind == "state":
        return state_changed(e)
    bad = [d for d in e.damage if not d.large or not moved_too_far(e)]
    if not bad:
        return None
    first = bad[0]
    verdict = f"{first.what} {first.name} was corrupt before the step: {first.words}"
    fix = ["resume=<run folder> (the last healthy checkpoint)", "if it happens again, test the machine's memory"]
    return Diagnosis("corrupt_state", 0.95, verdict, fix, [f"{d.what} {d.name}: {d.words}" for d in bad[:8]])


def state_changed(e: Evidence) -> Diagnosis:
    """Weights, buffers or moments have changed since the last update."""
    whose = "" if e.reading.rank < 0 else f" of rank {e.reading.rank}"
    names = [f"{d.what} {d.name}" for d in e.damage]
    what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "weights or moments"
    fix = [
        "test the machine's memory, if no code of yours writes weights, buffers or moments outside of the step",
        "resume=<run folder> on another device",
    ]
    lines = [f"{d.what} {d.name}: changed {d.words}" for d in e.damage[:8]]
    return Diagnosis("corrupt_state", 0.99, f"{what}{whose} changed between two updates", fix, lines)


def hardware_fault(e: Evidence) -> Diagnosis | None:
    """The replay differs from the step, while two replays are bitwise equal; or only the sum over the ranks was bad."""
    if e.recheck is not None:
        return differs_from_recheck(e.recheck)
    again = e.outcomes.get("same")
    if again is None or again.finite is None:
        return None
    differs = again.bitwise_equal_to_reading is False and e.repeats
    if not (differs or e.parts_normal):
        return None
    # A spike must be gone in the replay: if it remains, with other bits, the machine did not cause it.
    cured = e.setting.deterministic and e.normal("same") if e.kind == "spike" else again.finite
    if not cured:
        return None
    confidence = 0.95 if e.setting.deterministic else 0.6
    fix = "resume on another device, and test this one"
    if e.parts_normal:
        fix = "resume on other devices, and test these and the network between them"
    return Diagnosis("hardware_fault", confidence, replay_difference(e, again), [fix], [])


def differs_from_recheck(found: Finding) -> Diagnosis | None:
    """A gradient or an update came out differently when it was computed a second time."""
    if not found.differs:
        return None
    if found.blame is not None:
        return differs_from_rank(found, found.blame)
    what = {"gradient": "the gradient of a micro-batch", "update": "the optimizer's update of a tensor"}[found.part]
    rest = "" if len(found.tensors) == 1 else f" and in {len(found.tensors) - 1} more"
    name, largest = found.tensors[0]
    verdict = (
        f"{what} was computed twice and came out differently, in {name}{rest} by up to {largest:.3g} times the largest "
        f"value: {found.place}"
    )
    third = {
        "first": "a third computation equals the first: the second was wrong",
        "second": "a third computation equals the second: the first was wrong",
        "neither": "a third computation equals neither",
        "": "there was no third computation",
    }[found.third]
    allowed = (
        "equal bits are expected"
        if found.limit == 0
        else f"in {name}, up to {found.limit:.3g} is usual on this machine"
    )
    lines = [
        found.place,
        third,
        f"{allowed}; {found.agreed} earlier repetitions had the same bits",
        *(f"{each}: differs by {size:.3g} times its largest value" for each, size in found.tensors[:8]),
    ]
    sure = {"first": 0.95, "second": 0.95}.get(found.third, 0.8 if found.limit == 0 else 0.6)
    return Diagnosis("hardware_fault", sure, verdict, ["resume on another device, and test this one"], lines)


def differs_from_rank(found: Finding, blame: Blame) -> Diagnosis:
    """Two ranks computed the loss and the gradient of one micro-batch with different bits."""
    rest = "" if len(blame.names) == 1 else f" and {len(blame.names) - 1} more"
    pairs = [*dict.fromkeys(f"ranks {min(pair)} and {max(pair)}" for pair in blame.pairs)]
    what = f"the same micro-batch came out with different bits on {' and on '.join(pairs)}, in {blame.names[0]}{rest}"
    if len(blame.suspects) > 1:
        verdict, sure = f"{what}, and it is not known which of them computed wrongly: {found.place}", 0.6
    elif len(blame.pairs) > 1:
        verdict, sure = f"{what}: rank {blame.suspects[0]}, which is in both, computes wrongly: {found.place}", 0.95
    else:
        verdict, sure = f"{what}; rank {blame.pairs[0][1]} got its bits twice: {found.place}", 0.7
    hosts = ",".join(found.hosts)
    fix = [
        f"take {hosts} out of service (with Slurm: scontrol update nodename={hosts} state=drain reason=arithmetic), "
        "resume=<run folder> on other cards, and test the cards that are named",
        "resume from a checkpoint of before the fault, if it is known when it began: the weights hold its gradients",
    ]
    lines = [found.place, f"equal bits are expected; {found.agreed} earlier comparisons of the ranks had them"]
    lines += [f"{pair}: the bits differ" for pair in pairs]
    return Diagnosis("hardware_fault", sure, verdict, fix, [*lines, f"differs: {', '.join(blame.names[:8])}"])


def bad_inputs(e: Evidence) -> Diagnosis | None:
    """Finite values far larger than those of another batch, in one sample or in most."""
    if not has_input_outlier(e) or e.largest_input is None:
        return None
    found, total = e.largest_input, len(e.largest_input.sizes)
    worst = sample_name(found.sample, e)
    verdict, fix = f"{worst} holds a value of {found.largest:.4g}{found.place}", f"clean {worst}"
    if (number := outliers(found)) > max(total / 2, 1):
        who = f"all {total} samples" if number == total else f"{number} of {total} samples"
        verdict = f"{who} of {batch_name(e)} are far too large, with values up to {found.largest:.4g}{found.place}"
        fix = f"check the scaling (normalisation) of the data: {who} are out of range, not a single one"
    verdict += f"; the largest in another batch is {found.elsewhere:.4g}"
    return Diagnosis("bad_batch", 0.9, verdict, [fix, *tolerate_batch(e)], origin_lines(e))


def loss_scale_collapse(e: Evidence) -> Diagnosis | None:
    """The loss scale is at its floor and gradients still overflow."""
    floor = e.setting.values.get("precision.min_scale")
    scaled = e.setting.choices.get("precision") in ("fp16", "auto") and isinstance(floor, int | float)
    at_floor = scaled and e.kind == "nonfinite" and e.reading.loss_scale <= floor and math.isfinite(e.reading.loss)
    narrow_only = e.finite("fp32") is True and e.origin is not None and e.origin.dtype == "float16"
    if not (at_floor and narrow_only and e.origin and e.origin.direction == "backward"):
        return None
    return Diagnosis(
        "loss_scale_collapse",
        0.9,
        f"the loss scale has fallen to its minimum, {e.reading.loss_scale:g}, and gradients still overflow fp16",
        [*wider_precision(e), *more_fp32_modules(e), *logit_bounds(e)],
        origin_lines(e),
    )


def fp16_underflow(e: Evidence) -> Diagnosis | None:
    """Gradients are 0 in fp16 and not in fp32."""
    u = e.underflow
    if u is None or not u.real or e.setting.choices.get("precision") == "fp8":
        return None
    verdict, lines = lost_gradients(u, "fp16")
    tried = (
        "no larger loss scale avoids both underflow and overflow"
        if u.sufficient_scale is None
        else f"a loss scale of {u.sufficient_scale:g} keeps them"
    )
    verdict = f"at loss scale {u.loss_scale:g}, {verdict}"
    return Diagnosis("fp16_underflow", 0.95, verdict, larger_loss_scale(e, u), [*lines, tried])


def zero_variance_norm(e: Evidence) -> Diagnosis | None:
    """A normalisation divides by a variance of 0."""
    o = e.origin
    if o is None or weights_ruined(e):
        return None
    if o.why not in ("zero_variance", "variance_of_one") and not (
        o.why in DIVISIONS and is_spread([o.op, *e.divisor_ops])
    ):
        return None
    fix = [f"add eps >= 1e-6 inside the square root at {source_line(e)}, and compute it in fp32", *more_fp32_modules(e)]
    if o.why == "variance_of_one":  # 0 / 0 before any root
        fix = [f"{source_line(e)}: take the variance of at least two values, or correction=0"]
    return Diagnosis("zero_variance_norm", 0.9, origin_sentence(e), fix, origin_details(e))


def fp16_overflow(e: Evidence) -> Diagnosis | None:
    """A value above 65504, the largest in fp16."""
    o = e.origin
    if o is None or o.dtype != "float16" or not (o.why in ("overflow", "exp_overflow") or finite_in_fp32(e)):
        return None
    if (o.in_fp32 is not None and not math.isfinite(o.in_fp32)) or weights_ruined(e):
        return None
    if first_loss_too_large(e) and not e.normal("fresh_batch"):  # `bad_init`
        return None
    if e.finite("fp32") is False:  # fp16 without autocast: the model's own code casts
        fix = [f"compute it in fp32: {source_line(e)} itself casts to float16"]
    else:
        fix = [*wider_precision(e), *more_fp32_modules(e), *logit_bounds(e)]
    if adds_masks(o):
        fix = [f"{source_line(e)}: {MASKS}"]
    return Diagnosis("fp16_overflow", 0.95, origin_sentence(e), fix, origin_details(e))


def unsafe_op(e: Evidence) -> Diagnosis | None:
    """An operation has no finite result for these inputs."""
    o = e.origin
    if (
        o is None
        or weights_ruined(e)
        or o.why in ("overflow", "given")
        or (o.why == "unknown" and not no_finite_result(e))
        or (o.why == "buffer" and e.reading.step <= FIRST_STEPS and reads_huge_values(o))  # huge before it read them
    ):
        return None
    how = how_to_change(o)
    sure = 0.7 if o.why in ("unknown", "buffer") else 0.9
    return Diagnosis("unsafe_op", sure, origin_sentence(e), [f"{source_line(e)}: {how}"], origin_details(e))


def bad_init(e: Evidence) -> Diagnosis | None:
    """The first steps fail with every batch."""
    if (
        e.reading.step > FIRST_STEPS
        or e.finite("same") is None  # the step could not be run again: nothing is known of it
        or e.normal("fresh_batch")
        or e.normal("older_state")
        or moved_too_far(e)
        or loss_has_risen(e)
    ):
        return None
    verdict = f"{origin_sentence(e)}, in step {e.reading.step}"
    return Diagnosis("bad_init", 0.8, verdict, [*other_inits(e), *lower_lr(e)], origin_details(e) + chain_lines(e))


def updates_too_large(e: Evidence) -> Diagnosis | None:
    """All weights have moved further than in any healthy training."""
    if not moved_too_far(e) or e.normal("fresh_batch") or e.drift is None:
        return None
    d = e.drift
    when = "in the last update" if d.steps == 1 else f"in {d.steps} steps"
    verdict = f"{when}, a typical parameter moved by {d.moved:.3g}, {d.share * d.steps:.3g} times its own RMS"
    fix = smaller_updates(e)
    if moved_beyond_lr(e):
        verdict += f", further than lr={e.reading.lr:.3g} allows: at least one update was far too long"
        fix = ["guard=rollback", *fix] if e.setting.choices.get("guard") not in ("rollback", None) else fix
    return Diagnosis("lr_too_high", 0.85, verdict, fix, chain_lines(e))


def attention_logit_growth(e: Evidence) -> Diagnosis | None:
    """Attention logits have grown more than the weights in general."""
    name = "attn_logit_max" if e.size("attn_logit_max") > 0 else "softmax_max"  # attention that the probe does not know
    largest, grown = e.size(name), e.grown(name)
    others = 1.0 if e.drift is None else e.drift.grown  # squared below: a logit is a product of two weights
    slow = TREND_PER_STEP ** (1 if e.drift is None else e.drift.steps)
    enough = 1.0 if largest > DIVERGING_LOGIT else min(MIN_GROWTH, slow) if largest > LARGE_LOGIT else MIN_GROWTH
    if not largest > ONE_HOT_LOGIT or not grown > enough * max(others, 1.0) ** 2:
        return None
    fix = [
        f"{group}={option}"
        for group, option in (("qknorm", "layernorm"), ("qkclip", "kimi"))
        if e.setting.has_attention and e.setting.choices.get(group) == "none"
    ]
    fix = fix or ["normalise queries and keys before their product (QK-norm), or cap the product"]
    verdict = f"attention logits have reached {largest:.4g}, {grown:.3g} times their size with older weights"
    return Diagnosis("attention_logit_growth", 0.85, verdict, [*fix, *lower_lr(e)], origin_lines(e))


def output_logit_drift(e: Evidence) -> Diagnosis | None:
    """log Z of the output softmax has drifted away from 0."""
    drift = abs(e.size("log_z_mean"))
    since = drift - abs(e.before.get("monitors/log_z_mean", math.nan))
    torn = e.drift is not None and e.drift.grown > MIN_GROWTH
    if torn or not drift > MAX_LOG_Z or not since > min(MAX_LOG_Z / 2, 0.1 * drift):
        return None
    fix = ["zloss=palm"] if e.setting.choices.get("zloss") == "none" and has_cross_entropy(e) else []
    return Diagnosis(
        "output_logit_drift",
        0.8,
        f"mean log Z has drifted to {e.size('log_z_mean'):.4g}",
        [*fix, *lower_lr(e)],
        origin_lines(e),
    )


def overflow(e: Evidence) -> Diagnosis | None:
    """An overflow of fp32 or bf16, although the weights have not grown."""
    o = e.origin
    if o is None or o.why != "overflow" or o.dtype == "float16" or (e.drift is not None and e.drift.grown > MIN_GROWTH):
        return None
    if loss_has_risen(e):
        return None
    how = MASKS if adds_masks(o) else "scale the inputs down, or compute with logarithms"
    # If another batch is normal, the weights are, too: this batch reaches the operation, or reaches further.
    sure, rest = (0.8, []) if e.normal("fresh_batch") else (0.6, lower_lr(e))
    lines = origin_details(e) + chain_lines(e)
    return Diagnosis("unsafe_op", sure, origin_sentence(e), [f"{source_line(e)}: {how}", *rest], lines)


def bad_batch(e: Evidence) -> Diagnosis | None:
    """Only this batch fails."""
    if not e.normal("fresh_batch"):
        return None
    who = "" if e.culprits is None or not e.culprits.samples else f" (samples {e.culprits.samples[:8]})"
    sure = 0.9 if e.normal("older_state") is False else 0.7
    verdict = f"another batch is normal with the same weights: only this batch fails{who}"
    fix = ["inspect the batch: batch.safetensors in the incident's folder", *tolerate_batch(e)]
    return Diagnosis("bad_batch", sure, verdict, fix, origin_lines(e))


def updates_too_long(e: Evidence) -> Diagnosis | None:
    """Updates were longer than the learning rate allows, because v is older than m."""
    if not e.update_length > MAX_UPDATE_LENGTH or moved_too_far(e) or e.normal("older_state") is False:
        return None
    verdict = (
        f"updates were up to {e.update_length:.3g} times the learning rate: RMS(m / sqrt(v)) should be at most about 1"
    )
    return Diagnosis("optimizer_staleness", 0.8, verdict, [*faster_second_moment(e), *lower_lr(e)], origin_lines(e))


def optimizer_staleness(e: Evidence) -> Diagnosis | None:
    """Gradients have outgrown Adam's second moment."""
    if not e.staleness > STALE_RATIO or e.normal("older_state") is False or e.normal("fresh_batch") or moved_first(e):
        return None
    if loss_has_risen(e):  # the loss has risen with the gradients: updates were too large
        return None
    verdict = f"RMS(g / sqrt(v)) is {e.staleness:.3g}; it should be near 1"
    return Diagnosis("optimizer_staleness", 0.7, verdict, [*faster_second_moment(e), *lower_lr(e)], [])


def lr_too_high(e: Evidence) -> Diagnosis | None:
    """Other batches fail too, and no earlier rule holds."""
    if e.normal("fp32") is not False:
        return None
    if e.normal("fresh_batch") is None and loss_has_risen(e):
        verdict = f"the loss was {e.setting.best_loss:.4g} and has risen to {e.reading.loss:.4g}, and fp32 fails too"
        return Diagnosis("lr_too_high", 0.6, verdict, smaller_updates(e), chain_lines(e))
    if e.normal("fresh_batch") is not False:
        return None
    sure = 0.8 if e.normal("older_state") else 0.6
    verdict, lines = "another batch fails with these weights too, even in fp32", chain_lines(e)
    if e.staleness > STALE_RATIO and moved_first(e):
        verdict += ", and older weights are normal: an update moved them too far"
        lines = [
            f"RMS(g / sqrt(v)) is {e.staleness:.3g}, and RMS(m / sqrt(v)) of the last update was "
            f"{e.update_length:.3g}: the gradients grew only after that update, so v was not out of date",
            *lines,
        ]
    return Diagnosis("lr_too_high", sure, verdict, smaller_updates(e), lines)


def unknown(e: Evidence) -> Diagnosis:
    """No rule holds. Without a cause there is no fix, but that a format with a larger range is always worth a try."""
    return Diagnosis("unknown", 0.0, origin_sentence(e), wider_precision(e), origin_details(e) + chain_lines(e))


Rule = Callable[[Evidence], Diagnosis | None]

RULES: tuple[Rule, ...] = (
    # Direct observations: the batch's values, the state, the machine. If one of these is bad, no other cause is needed.
    poison_input,
    bad_label,
    uninitialised,
    corrupt_state,
    # An update that was not finite, from a state and gradients that were: nothing before it is to blame.
    bad_setting,
    unsafe_optimizer,
    finite_when_rerun,
    hardware_fault,
    bad_inputs,
    # The number format comes before the weights: fp16 overflows with weights that are fine in bf16.
    loss_scale_collapse,
    fp16_underflow,
    fp8_underflow,
    zero_variance_norm,
    fp16_overflow,
    fp8_overflow,
    unsafe_op,
    # The weights: first the initial ones, then the effect of updates, specific rules before general ones.
    bad_init,
    updates_too_large,
    updates_too_long,
    attention_logit_growth,
    output_logit_drift,
    # An operation that overflows: another batch may be normal only because it does not reach this operation.
    overflow,
    # Causes that only replays can tell apart: this batch fails, or every batch fails with these weights.
    bad_batch,
    optimizer_staleness,
    lr_too_high,
)
