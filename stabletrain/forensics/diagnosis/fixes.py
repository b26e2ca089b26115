"""Fixes: what to do about a cause, as overrides that exist and that this run has not, or as a change of a line."""

from stabletrain.forensics.diagnosis.evidence import RUSHED, Evidence, beyond_lr, decayed
from stabletrain.forensics.probes.underflow import Underflow

HEALTHY = 0.01
"""Share of itself that a typical parameter may move in a step."""

CUSTOMARY_STD = 0.02

FIXES = {
    "log_of_zero": "take log(x + eps), or log_softmax instead of log(softmax)",
    "log_of_negative": "keep the argument above 0, as by softplus or clamp(min=eps)",
    "root_of_negative": "clamp the argument at 0 or above before the root",
    "division_by_zero": "add eps to what is divided by, inside the root if there is one",
    "zero_over_zero": "add eps to what is divided by; with torch.where, make the argument safe first (double where)",
    "zero_to_negative_power": "add eps inside the power",
    "exp_overflow": "subtract the largest value first, as softmax and logsumexp do",
    "inf_minus_inf": "keep both below the format's largest number: one of them overflowed, or was made Inf on purpose",
    "zero_times_inf": "keep the factor finite: mask by torch.where before the operation that overflows, not after",
    "inf_over_inf": "scale both down first, as softmax does",
    "masked_row": "let no row be masked as a whole, or use a large negative number instead of -inf",
    "mean_of_nothing": "divide by max(n, 1)",
    "outside_domain": "clamp the argument inside the domain, away from its ends",
    "singular_matrix": "add a multiple of the identity",
    "written": "the code writes this constant: keep it out of what is learnt from",
    "unwritten": "write to memory before it is read: torch.zeros instead of torch.empty",
}
"""What to do about an operation without a finite result, by `Origin.why`."""


def wider(e: Evidence) -> list[str]:
    """A format of more range, if the run is not in it."""
    chosen = e.setting.choices.get("precision")
    return [f"precision={name}" for name in ("bf16", "fp32") if chosen not in (name, "bf16")][:1]


def more_fp32_modules(e: Evidence) -> list[str]:
    """The module in fp32, where autocast chooses the format."""
    o = e.origin
    inside = o is not None and o.module not in ("", "objective")
    low = e.setting.choices.get("precision") in ("fp16", "bf16", "auto")
    return [f"precision.fp32_modules=[{o.module}]"] if o is not None and inside and low else []


def structure(e: Evidence) -> list[str]:
    """What keeps logits small, where the model takes it and does not have it."""
    return [
        f"{group}={option}"
        for group, option in (("qknorm", "layernorm"), ("softcap", "gemma2"), ("zloss", "palm"))
        if e.setting.choices.get(group) == "none" and (e.setting.has_attention or group == "zloss")
    ]


def larger_scale(e: Evidence, u: Underflow) -> list[str]:
    """The loss scale that keeps what is lost, a way back to it if overflows have lowered it, and a wider format."""
    initial, interval = (e.setting.values.get(f"precision.{key}") for key in ("init_scale", "growth_interval"))
    auto = e.setting.choices.get("precision") == "auto"  # fp16 was chosen because the card has no bf16
    fix = [f"precision={'fp32' if auto else 'bf16'}"]
    if u.cure is None or not isinstance(initial, int | float):
        return fix
    if u.cure > initial:
        return [f"precision.init_scale={int(u.cure)}", *fix]
    shorter = isinstance(interval, int) and interval > 1
    return [*fix, *([f"precision.growth_interval={max(1, interval // 10)}"] if shorter else [])]


def other_weights(e: Evidence) -> list[str]:
    """Initial weights of a customary size, other than those that the run has."""
    chosen, std = e.setting.choices.get("init"), e.setting.values.get("init.std")
    smaller = isinstance(std, int | float) and std > CUSTOMARY_STD
    # The others ask for what only a GPT has.
    usual = ("gpt2", "small") if e.setting.has_attention else ("torch", "fan_in")
    fix = [f"init={name}" for name in usual if chosen != name]
    return [f"init.std={CUSTOMARY_STD}", *fix] if smaller and chosen == usual[0] else fix


def slower(e: Evidence) -> list[str]:
    """A learning rate at which a typical parameter would move by a healthy share of itself a step."""
    if decayed(e):
        customary = 0.1 if e.drift is None or e.drift.adaptive else 1e-4
        return [f"optimizer.weight_decay={customary:g}"]
    rate = e.setting.values.get("optimizer.lr")
    if e.drift is None or not isinstance(rate, int | float) or e.drift.share <= RUSHED or beyond_lr(e):
        return lower_lr(e)
    return [f"optimizer.lr={rate * HEALTHY / e.drift.share:.1g}", *lower_lr(e)[:-1]]


def lower_lr(e: Evidence) -> list[str]:
    """A third of the learning rate, or twice the warmup while it lasts."""
    fix = []
    rate = e.setting.values.get("optimizer.lr")
    if isinstance(rate, int | float):
        fix.append(f"optimizer.lr={rate / 3:.2g}")
    if e.setting.warmup and e.reading.step <= 2 * e.setting.warmup:
        fix.insert(0, f"warmup.steps={2 * e.setting.warmup}")
    return fix


def younger_moments(e: Evidence) -> list[str]:
    """Updates that are cut where the second moment does not follow, or one that follows the gradients sooner."""
    betas = e.setting.values.get("optimizer.betas") or [0, 0]
    fix = ["optimizer=stable_adamw"] if e.setting.choices.get("optimizer") == "adamw" else []
    return [*fix, *([f"optimizer.betas=[{betas[0]},0.95]"] if betas[-1] > 0.95 else [])]


def past_it(e: Evidence) -> list[str]:
    """What bears a bad batch, as far as the run has not got it."""
    fix = [] if e.setting.choices.get("guard") in ("rollback", None) else ["guard=rollback"]
    return [*fix, *([] if e.setting.choices.get("clipping") == "zclip" else ["clipping=zclip"])]
