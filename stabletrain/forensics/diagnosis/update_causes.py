"""Rules for an optimizer's step that gave NaN or Inf although loss, gradients and state were finite.

Lowering the learning rate is never a fix: at any rate, 0 / 0 is NaN.
"""

from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.evidence import Evidence
from stabletrain.forensics.diagnosis.wording import FIXES, nonzero_init, norm_clipping
from stabletrain.forensics.probes.update import UpdateFault
from stabletrain.forensics.probes.update_reason import READS_ZERO

NOT_FINITE = "the optimizer's step gave values that are not finite, although loss, gradients and state were finite"

LEAST_EPS = {"float16": 1e-4}
"""An eps that a format can hold beside the root of a second moment; others hold 1e-8."""


def bad_setting(e: Evidence) -> Diagnosis | None:
    """A number in a parameter group that is not finite, or out of its range."""
    u = e.update
    if u is None or not u.bad_settings:
        return None
    first = u.bad_settings[0]
    of_group = f"{first.key} of parameter group {first.group}"
    more = f", and {len(u.bad_settings) - 1} more settings" if len(u.bad_settings) > 1 else ""
    verdict = f"{of_group} of {u.optimizer} is {first.value:g}, {first.words}{more}"
    fix = f"correct {of_group}: the scheduler or the code that last wrote it, or the optimizer's arguments"
    others = [f"{each.key} of parameter group {each.group} is {each.value:g}" for each in u.bad_settings[1:8]]
    return Diagnosis("bad_setting", 0.97, verdict, [fix], [*others, *lines_of(u)])


def unsafe_optimizer(e: Evidence) -> Diagnosis | None:
    """An operation of the optimizer has no finite result."""
    if e.kind != "update":
        return None
    u = e.update
    if u is None and e.update_ran:  # `finite_when_rerun`
        return None
    if u is None:
        fix = "look at the optimizer's denominators: keep each above 0, with eps or clamp(min=eps)"
        return Diagnosis("unsafe_optimizer", 0.5, f"{NOT_FINITE}; the step could not be run again", [fix], [])
    o = u.origin
    at = "" if o is None else f"{o.op} for {u.parameter} (update, {o.dtype}): "
    return Diagnosis("unsafe_optimizer", confidence(u), f"{at}{u.reason}", fixes_of(e, u), lines_of(u))


def finite_when_rerun(e: Evidence) -> Diagnosis | None:
    """The step is finite when it is run again with the same state and gradients."""
    if e.kind != "update" or e.update is not None or not e.update_ran:
        return None
    fix = "resume on another device, and test this one"
    sure = 0.9 if e.setting.deterministic else 0.6
    again = "it is finite when it is run again with the same state and gradients"
    return Diagnosis("hardware_fault", sure, f"{NOT_FINITE}; {again}", [fix], [])


def confidence(u: UpdateFault) -> float:
    """How sure the reason is: less if the operation was not seen."""
    if u.why == "untraced":
        return 0.6 if u.root is not None else 0.5
    return 0.85 if u.fused else 0.95 if u.why != "unknown" else 0.8


def fixes_of(e: Evidence, u: UpdateFault) -> list[str]:
    """What to change, best first."""
    source = u.origin.source if u.origin is not None else ""
    at = u.optimizer if not source or source.startswith("torch/") else source  # PyTorch's own code is not edited
    eps = LEAST_EPS.get(u.dtype, 1e-8)
    if u.why == "zero_eps":
        known = e.setting.values.get("optimizer.eps") == 0
        first = [f"optimizer.eps={eps:g}" if known else f"{u.optimizer}(eps={eps:g}): eps is 0 in group {u.group}"]
    elif u.why == "lost_eps":
        first = [
            *fp32_state(u),
            f"optimizer.eps={eps:g}" if "optimizer.eps" in e.setting.values else f"{u.optimizer}(eps={eps:g})",
        ]
    elif u.why == "flushed":
        first = [*fp32_state(u), floor_denominator(u, at)]
    elif u.why in ("second_moment", "overflow", "exp_overflow"):
        whose = "the gradient" if u.root is None else f"the gradient of {u.root.parameter}"
        first = [*norm_clipping(e), f"{at}: limit {whose} before this operation, as clipping by value does"]
    elif u.why in READS_ZERO and "log" not in u.why:
        first = [floor_denominator(u, at)]
    elif u.why == "untraced":
        first = [f"look at how {u.optimizer} computes {u.parameter}: floor each denominator, eps > 0"]
        if u.dtype in ("float16", "bfloat16"):
            first = [*fp32_state(u), *first]
    elif u.why in ("constant", "zero_number"):
        first = [f"{at}: keep the number finite and above 0: it was computed outside of tensors, in Python"]
    else:
        first = [f"{at}: {FIXES.get(u.why, 'keep the argument inside the domain of the operation')}"]
    came_from_zero = u.root is not None and u.root.zeros > 0
    return [*first, *(another_init(e, u) if came_from_zero else [])]


def floor_denominator(u: UpdateFault, at: str) -> str:
    """Keeps a denominator above 0."""
    if u.origin is not None and u.origin.op.rpartition(".")[2].startswith(("rsqrt", "_foreach_rsqrt")):
        return f"{at}: add eps before the root is inverted: 1 / (v.sqrt() + eps), or (v + eps).rsqrt()"
    what = f"({u.divisor}).clamp(min=1e-12)" if u.divisor and "_foreach_" not in u.divisor else "clamp(min=1e-12)"
    return f"{at}: floor the denominator: {what}, or add eps to it"


def fp32_state(u: UpdateFault) -> list[str]:
    """Keeps the numbers of the optimizer in fp32."""
    name = {"float16": "fp16", "bfloat16": "bf16"}.get(u.dtype)
    if name is None:
        return []
    return [
        f"keep fp32 master weights: parameters and moments in fp32, and {name} in autocast only, not {name} weights"
    ]


def another_init(e: Evidence, u: UpdateFault) -> list[str]:
    """Another initialisation than zero, if zeros in the weights make the zeros in the gradient."""
    if u.root is not None and u.root.what == "parameter":
        return [f"initialise {u.root.parameter} otherwise than with zeros"]
    if u.zero_weights:
        return nonzero_init(e, u.zero_weights)
    if u.root is not None and u.root.zeros == 1:
        return [f"if {u.root.parameter} takes no part in the loss: requires_grad_(False), or not in the optimizer"]
    return []


def lines_of(u: UpdateFault) -> list[str]:
    """What was found besides the verdict."""
    found = []
    if u.origin is not None and u.origin.source:
        found.append(f"at {u.origin.source}" + (f": {u.text}" if u.text else ""))
    found.append(f"not finite after the step ({u.count}): {', '.join(u.broken)}")
    if u.root is not None:
        found.append(f"{u.root.what} of {u.root.parameter}: up to {u.root.largest:.4g}, {u.root.zeros:.1%} of it is 0")
    if u.zero_weights:
        found.append(f"weights that are exactly 0: {', '.join(u.zero_weights)}")
    if u.settings:
        found.append(f"group {u.group}: {', '.join(f'{key}={value:g}' for key, value in u.settings.items())}")
    return found
