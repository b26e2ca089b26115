"""Signs: what evidence shows that several rules ask for, each with the bound it is judged by."""

import itertools
import math
from collections.abc import Sequence

from stabletrain.forensics.evidence import Evidence

FIRST_STEPS = 3
"""Steps within which a run is still what its initialisation made it."""

RUSHED = 0.4
"""Share of itself that a typical parameter moves in a step, over several, from which on the learning rate is at fault.

Adam moves weights of std 0.02 by 0.15 of that in a first step at 3e-3, a customary rate."""

WILD = 3.0
"""The same, from which on nothing that breaks says anything but this."""

ABSURD = 30.0
"""Nats: guessing among 50,000 classes costs 11."""

WAYS = 4.0
"""Learning rates by which a single update of Adam may exceed one."""

OVERLONG = 1.5
"""RMS(m / sqrt(v)) from which on v is older than m: of moments of one age it is at most about 1."""

BRIGHT = 20.0
"""Times the largest input of another batch, from which on an input is none of this data: the guard's own ratio."""

DECAYED = 0.5
"""Share of themselves that weight decay takes off the weights in a step, from which on it is to blame."""

HUGE = 1e6
"""Values beyond which an operation may fail on the way to its result in fp64 too."""

DIVISIONS = ("division_by_zero", "zero_over_zero", "zero_to_negative_power", "inf_minus_inf", "zero_times_inf")
SPREADS = ("var", "std", "var_mean", "std_mean")
LENGTHS = ("linalg_vector_norm", "norm")


def is_spread(ops: Sequence[str]) -> bool:
    """Whether operations, the last first, compute a variance: also as a mean of squares, or a length of what is centred
    or divided by the root of its number. The length of a vector is none."""
    names = [op.removeprefix("aten.").rstrip("_") for op in ops]
    if any(name in SPREADS for name in names):
        return True
    if any(a == "mean" and b in ("pow", "square", "mul") for a, b in itertools.pairwise(names)):
        return True
    at = next((number for number, name in enumerate(names) if name in LENGTHS), None)
    scaled = at is not None and any(name in ("mul", "div") for name in names[1:at])
    return scaled or (at is not None and names[at + 1 : at + 2] == ["sub"])


def narrow(e: Evidence) -> bool:
    """Whether fp32 has no trouble with what fp16 has."""
    return e.finite("fp32") is True and e.origin is not None and e.origin.in_fp32 is not None


def no_result(e: Evidence) -> bool:
    """Whether the operation has no finite result in any format, of values that are finite and not huge."""
    o = e.origin
    if o is None or o.should_have_been is None or math.isfinite(o.should_have_been):
        return False
    return all(read.absmax is None or read.absmax < HUGE for read in o.inputs)


def overlong(e: Evidence) -> float:
    """How many learning rates the updates have been long, where that is more than a step of Adam's may be; else 1."""
    return e.overlong if e.overlong > OVERLONG else 1.0


def rushed(e: Evidence) -> bool:
    """Whether the weights as a whole have moved further than any healthy training moves them."""
    return e.drift is not None and (e.drift.share / overlong(e) > RUSHED or beyond_lr(e))


def beyond_lr(e: Evidence) -> bool:
    """Whether the weights have moved further than so many steps of the learning rate can take them."""
    rate = e.setting.values.get("optimizer.lr")
    if e.drift is None or not e.drift.adaptive or not isinstance(rate, int | float):
        return False
    return e.drift.moved > rate * (e.drift.steps + WAYS) * overlong(e)


def wild(e: Evidence) -> bool:
    """Whether updates have torn the weights apart, so that it is no matter where it breaks first."""
    torn = e.drift is not None and (e.drift.share > WILD or beyond_lr(e))
    return torn and e.normal("older_state") is True


def absurd_at_first(e: Evidence) -> bool:
    """Whether the loss of a first step is far above that of guessing, in a format that can hold it."""
    wide = e.outcomes.get("fp32")
    return e.reading.step <= FIRST_STEPS and wide is not None and (wide.loss or 0.0) > ABSURD


def too_bright(e: Evidence) -> bool:
    """Whether an input is far larger than those of another batch, which the step bears."""
    known = e.loudest is not None and e.loudest.elsewhere > 0
    return known and e.loudest.largest > BRIGHT * e.loudest.elsewhere and e.finite("fresh_batch") is True


def decayed(e: Evidence) -> bool:
    """Whether weight decay alone takes the weights apart."""
    decay, rate = (e.setting.values.get(f"optimizer.{key}") for key in ("weight_decay", "lr"))
    if not isinstance(decay, int | float) or not isinstance(rate, int | float) or decay <= 1:  # then it is the rate's
        return False
    return decay * (1.0 if e.setting.values.get("optimizer.decay") == "independent" else rate) > DECAYED
