"""What was found out about an incident, the signs that rules look for in it, and the sentences that say so.

Evidence: everything that was found out about an incident, in numbers and words; what rules decide by.

Signs: what evidence shows that several rules ask for, each with the bound it is judged by.

Words: what is known of an incident, as sentences for a person.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stabletrain.forensics.probes.samples import Culprits
from stabletrain.forensics.probes.underflow import Underflow
from stabletrain.forensics.replay import Outcome
from stabletrain.forensics.trace.origin import Origin
from stabletrain.records import Reading


@dataclass(frozen=True)
class RunSettings:
    """What the run is set to, as far as a fix may touch it.

    Attributes:
        choices: option by config group.
        values: value by dotted key: `optimizer.lr`, `warmup.steps`.
        has_attention: whether the model takes QK-norm and softcap.
        warmup: steps of warmup.
        loss_limit, norm_limit: the guard's limits at the time.
        deterministic: whether the same step must give the same bits here.
    """

    choices: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    has_attention: bool = False
    warmup: int = 0
    loss_limit: float = math.inf
    norm_limit: float = math.inf
    deterministic: bool = True


@dataclass(frozen=True)
class Damage:
    """Something of the state that was bad before the step ran.

    Attributes:
        what: `parameter`, `buffer` or a moment's name.
        name: of the parameter or buffer.
        words: what is wrong with it.
        few: whether only a few elements are, which no update does.
        large: whether that is all: the elements are finite, and far beyond what they were.
    """

    what: str
    name: str
    words: str
    few: bool = False
    large: bool = False


@dataclass(frozen=True)
class Drift:
    """How far the weights have moved since an older state.

    Attributes:
        steps: since then.
        moved: RMS of the change of a parameter's elements, the median over the parameters.
        share: the same over the RMS that they had, a step: how much of itself a typical parameter moves in one.
        grown: RMS of a parameter over the RMS that it had, the median over the parameters.
        adaptive: whether an update moves no element by much more than the learning rate, as Adam's does not.
    """

    steps: int
    moved: float
    share: float
    grown: float
    adaptive: bool


@dataclass(frozen=True)
class LargestInput:
    """The sample with the largest input of a batch, where inputs are no ids.

    Attributes:
        sample: its `index` in the batch, and `id` and `source` where the data says them.
        largest: magnitude of its largest input.
        elsewhere: the largest of another batch.
    """

    sample: Mapping[str, Any]
    largest: float
    elsewhere: float


@dataclass(frozen=True)
class Evidence:
    """One incident.

    Attributes:
        kind: `nonfinite`, `spike` or `loss_scale`.
        reading: of the step.
        samples: bad samples of the batch, as `samples.bad_samples` lists them.
        damage: of the state before the step.
        origin: the operation that made the first non-finite numbers; None for a finite step.
        makers: names of the operations that what the origin divides by, or takes the root of, came from, nearest first.
        outcomes: of the replays, by variant.
        repeats: whether running the step again twice gave the same bits; None if nobody looked.
        drift: how far the weights are from the older state; None if there is none.
        culprits: which samples make the step non-finite.
        sizes: the monitors' metrics on this step's state and batch; `before` on an older state.
        before: see `sizes`.
        largest_input: the sample with the largest input; None for ids, or where there is no other batch to compare
            with.
        overlong: largest RMS(m / sqrt(v)) over the parameters, of the moments before the step: learning rates that
            updates have been long; NaN where there are no such moments.
        staleness: largest RMS(g / sqrt(v)) over the parameters; NaN where there is no second moment.
        underflow: what fp16 has lost of the gradients; None if nobody looked.
        setting: the run's.
    """

    kind: str
    reading: Reading
    samples: Sequence[Mapping[str, Any]] = ()
    damage: Sequence[Damage] = ()
    origin: Origin | None = None
    makers: Sequence[str] = ()
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    repeats: bool | None = None
    drift: Drift | None = None
    culprits: Culprits | None = None
    sizes: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    largest_input: LargestInput | None = None
    overlong: float = math.nan
    staleness: float = math.nan
    underflow: Underflow | None = None
    setting: RunSettings = field(default_factory=RunSettings)

    def normal(self, variant: str) -> bool | None:
        """Whether a replay was finite and within the guard's limits; None if it was not run."""
        outcome = self.outcomes.get(variant)
        if outcome is None or outcome.finite is None or outcome.loss is None or outcome.grad_norm is None:
            return None
        if not math.isfinite(self.reading.buffers):  # which a replay does not measure
            return None
        within = outcome.loss <= self.setting.loss_limit and outcome.grad_norm <= self.setting.norm_limit
        return outcome.finite and within

    def finite(self, variant: str) -> bool | None:
        """Whether a replay was finite; None if it was not run."""
        outcome = self.outcomes.get(variant)
        return None if outcome is None else outcome.finite

    def size(self, name: str) -> float:
        """One of the monitors' metrics; NaN where it was not measured."""
        return self.sizes.get(f"monitors/{name}", math.nan)

    def grown(self, name: str) -> float:
        """How many times as large as on the older state it is; NaN where it was not measured."""
        before = self.before.get(f"monitors/{name}", math.nan)
        return self.size(name) / before if before else math.nan


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
    known = e.largest_input is not None and e.largest_input.elsewhere > 0
    return known and e.largest_input.largest > BRIGHT * e.largest_input.elsewhere and e.finite("fresh_batch") is True


def decayed(e: Evidence) -> bool:
    """Whether weight decay alone takes the weights apart."""
    decay, rate = (e.setting.values.get(f"optimizer.{key}") for key in ("weight_decay", "lr"))
    if not isinstance(decay, int | float) or not isinstance(rate, int | float) or decay <= 1:  # then it is the rate's
        return False
    return decay * (1.0 if e.setting.values.get("optimizer.decay") == "independent" else rate) > DECAYED


def origin_sentence(e: Evidence) -> str:
    """Where it began, and how."""
    o = e.origin
    if o is None:
        return f"loss {e.reading.loss:.4g}, gradient norm {e.reading.grad_norm:.4g}"
    return f"{o.op} in {o.module or 'the model'} ({o.direction}, {o.dtype}): {o.reason}"


def place(e: Evidence) -> str:
    """The line of the code, or else the module."""
    o = e.origin
    return "the code" if o is None else o.source or o.module or "the model"


def beside(e: Evidence) -> list[str]:
    """What is known of the operation beyond `origin_sentence`."""
    o = e.origin
    lines = []
    if o is not None and o.should_have_been is not None:
        lines.append(f"computed in fp64 the largest value of {o.op} is {o.should_have_been:.6g}")
    if e.culprits and e.culprits.samples and not e.culprits.others_too:
        lines.append(f"samples that make it fail: {e.culprits.samples[:8]}")
    return lines


def origin_lines(e: Evidence) -> list[str]:
    """What is known of the operation, for a verdict that says nothing of it."""
    return [] if e.origin is None else [f"{origin_sentence(e)}, at {e.origin.source}", *beside(e)]


def chain_lines(e: Evidence) -> list[str]:
    """Magnitudes through the model."""
    chain = e.origin.chain if e.origin else ()
    return [f"{link.module} ({link.direction}, {link.dtype}): up to {link.absmax:.4g}" for link in chain]


def named(sample: Mapping[str, Any]) -> str:
    """A sample by its source, id or place."""
    if "source" in sample:
        return f"{sample['source']}"
    if "id" in sample:
        return f"sample {sample['id']}"
    return "the batch" if sample["index"] is None else f"sample {sample['index']} of the batch"
