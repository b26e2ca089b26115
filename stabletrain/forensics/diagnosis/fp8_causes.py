"""Rules for fp8: values that a cast saturates or turns into NaN or Inf, and values that it flushes to 0.

A cast to fp8 loses some values in every healthy step. So it is blamed only if the step is normal without fp8, or if the
trace of a non-finite step begins at the cast, or if whole gradients are 0 in fp8 and not in fp32.
"""

import math

from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.evidence import Evidence, finite_in_fp32, first_loss_too_large, weights_ruined
from stabletrain.forensics.diagnosis.wording import lost_gradients, origin_details, origin_sentence, source_line
from stabletrain.forensics.probes.fp8_casts import Cast
from stabletrain.forensics.trace.origin import Origin


def fp8_overflow(e: Evidence) -> Diagnosis | None:
    """A cast saturates, or gives NaN or Inf from finite values; or its scale is infinite; or a product overflows."""
    if e.origin is not None:
        return infinite_scale(e) or traced_to_cast(e, e.origin)
    if not casts_did_harm(e) or e.fp8 is None or not e.fp8.clipped:
        return None
    worst = e.fp8.clipped[0]
    lost = f"saturates {worst.saturated:.0%} of its values" if worst.saturated else f"makes {worst.nonfinite:.0%} NaN"
    return Diagnosis("fp8_overflow", 0.9, f"{cast_name(worst)} {lost}, {without_fp8(e)}", cast_fixes(e), cast_lines(e))


def traced_to_cast(e: Evidence, o: Origin) -> Diagnosis | None:
    """The trace begins at a cast to fp8, or at a product of fp8 values, whose result is finite in fp64."""
    cast = o.dtype.startswith("float8")
    product = any(values.dtype.startswith("float8") for values in o.inputs)
    if not (cast or product) or weights_ruined(e) or first_loss_too_large(e):
        return None
    if any(result is None or not math.isfinite(result) for result in (o.should_have_been, o.in_fp32)):
        return None
    # If it fails in fp32 too, the model's own code casts.
    fix = [scale_before_cast(source_line(e))] if e.finite("fp32") is False else cast_fixes(e)
    return Diagnosis(
        "fp8_overflow", 0.95 if cast or finite_in_fp32(e) else 0.8, origin_sentence(e), fix, origin_details(e)
    )


def infinite_scale(e: Evidence) -> Diagnosis | None:
    """The scale of a cast is infinite: the tensor's largest value, by which the code divides, is 0 or nearly."""
    if e.fp8 is None or e.origin is None:
        return None
    here = [one for one in e.fp8.casts if math.isinf(one.scale) and one.module == e.origin.module]
    if not here or e.origin.why not in ("division_by_zero", "overflow") or weights_ruined(e):
        return None
    verdict = f"the scale of {cast_name(here[0])} is infinite: {origin_sentence(e)}"
    fix = f"{source_line(e)}: clamp the tensor's largest value to at least 1e-12 before dividing by it"
    return Diagnosis("fp8_overflow", 0.9, verdict, [fix], origin_details(e))


def fp8_underflow(e: Evidence) -> Diagnosis | None:
    """Casts flush most of a tensor to 0, or gradients are 0 in fp8 and not in fp32."""
    u = e.underflow
    if u is not None and u.real and e.setting.choices.get("precision") == "fp8":
        verdict, listed = lost_gradients(u, "fp8")
        return Diagnosis("fp8_underflow", 0.95, verdict, cast_fixes(e), [*listed, *cast_lines(e)])
    if not casts_did_harm(e) or e.fp8 is None or e.fp8.clipped or not e.fp8.lost:
        return None
    worst = e.fp8.lost[0]
    verdict = f"{cast_name(worst)} flushes {worst.flushed:.0%} of its values to 0, {without_fp8(e)}"
    return Diagnosis("fp8_underflow", 0.9, verdict, cast_fixes(e), cast_lines(e))


def casts_did_harm(e: Evidence) -> bool:
    """Whether the step fails again with fp8, and is normal without."""
    return e.fp8 is not None and e.normal("same") is False and e.within_limits(e.fp8.without) is True


def cast_fixes(e: Evidence) -> list[str]:
    """Overrides that made a replay of the step normal, then bf16; a change to the code if the run is not in fp8."""
    tried = {} if e.fp8 is None else e.fp8.tried
    found = [override for override, outcome in tried.items() if e.within_limits(outcome)]
    if e.setting.choices.get("precision") == "fp8":
        return [*found, "precision=bf16"]
    worst = None if e.fp8 is None or not e.fp8.casts else e.fp8.casts[0]
    return [scale_before_cast(source_line(e) if worst is None else worst.source or worst.module)]


def scale_before_cast(where: str) -> str:
    """The change to the user's own cast."""
    return f"{where}: before the cast to fp8, scale by the largest fp8 number over the tensor's own largest value"


def cast_name(cast: Cast) -> str:
    """Names a cast, its scale and the largest value."""
    scale = "" if not math.isfinite(cast.scale) else f", scaled by {cast.scale:.4g}"
    top = "" if math.isnan(cast.absmax) else f" (up to {cast.absmax:.4g}{scale})"
    return f"the cast of {cast.module or 'the model'}'s {cast.tensor} to {cast.format}{top}"


def without_fp8(e: Evidence) -> str:
    """Describes the result of the replay without fp8."""
    assert e.fp8 is not None
    without = e.fp8.without
    return f"and without fp8 the step is normal (loss {without.loss:.4g}, gradient norm {without.grad_norm:.4g})"


def cast_lines(e: Evidence) -> list[str]:
    """The casts that lost the most, and the replays with an override."""
    if e.fp8 is None:
        return []
    casts = [
        f"{cast_name(one)}: {one.flushed:.1%} flushed to 0, {one.saturated:.1%} saturated, "
        f"{one.nonfinite:.1%} not finite"
        for one in e.fp8.casts
        if one.loss > 0
    ]
    tried = [
        f"replayed with {override}: loss {outcome.loss:.6g}, gradient norm {outcome.grad_norm:.6g}"
        for override, outcome in e.fp8.tried.items()
        if outcome.loss is not None and outcome.grad_norm is not None
    ]
    return [*casts, *tried]
