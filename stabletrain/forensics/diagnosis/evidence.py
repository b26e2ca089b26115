"""The evidence of an incident, and the tests on it that several rules share."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stabletrain.forensics.facts import Culprits, Damage, Drift, LargestInput, Outcome
from stabletrain.forensics.probes.fp8_casts import Fp8Casts
from stabletrain.forensics.probes.underflow import Underflow
from stabletrain.forensics.probes.update import UpdateFault
from stabletrain.forensics.trace.origin import Origin
from stabletrain.guard.checks.recheck import Finding
from stabletrain.records import RankPart, Reading


@dataclass(frozen=True)
class RunSettings:
    """The run's settings that a fix may change or a rule depends on.

    Attributes:
        choices: option by config group.
        values: value by dotted key: `optimizer.lr`, `warmup.steps`.
        has_attention: whether the model supports QK-norm and softcap.
        warmup: length of the warmup in steps.
        loss_limit, norm_limit: the guard's limits at this step.
        deterministic: whether repeating a step must give the same bits on this device.
        best_loss: smallest loss of an applied step; inf if unknown, as in a run whose older states are kept.
        usual_lr: learning rate that the run's option of `optimizer` has by itself; None if there is none.
    """

    choices: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    has_attention: bool = False
    warmup: int = 0
    loss_limit: float = math.inf
    norm_limit: float = math.inf
    deterministic: bool = True
    best_loss: float = math.inf
    usual_lr: float | None = None


@dataclass(frozen=True)
class Evidence:
    """All evidence about one incident.

    Attributes:
        kind: `nonfinite`, `spike`, `loss_scale`, `bad_data` for a finite step whose batch is bad, `state` for weights,
            buffers or moments that changed between two updates, `recheck` for a computation that gave another result
            the second time, or `update` for an optimizer's step that was not finite although loss, gradients and state
            were.
        reading: the step's.
        part: the investigating rank's own part of the step, as it measured it; None in a single process.
        loss_known: whether the step's loss is known; False in a user's loop that does not show it.
        parts_normal: on several ranks, whether the own part of every rank was normal, in the step and in a replay.
        samples: bad samples of the batch, from `bad_samples`.
        damage: corruption of the state before the step.
        origin: the operation to blame for non-finite values; None for a finite step.
        divisor_ops: names of the operations that computed the origin's divisor or root argument, nearest first.
        outcomes: of the replays, by variant.
        repeats: whether two replays gave the same bits; None if not tested.
        drift: change of the weights since the older state; None if there is none.
        culprits: the samples that make the step non-finite.
        sizes: the monitors' metrics on this step's state and batch.
        before: the same metrics on an older state.
        largest_input: the sample with the largest value; None for token ids, or without another batch to compare with.
        update_length: largest RMS(m / sqrt(v)) over the parameters, from the moments before the step. It is the length
            of the last update in learning rates. NaN without such moments.
        staleness: largest RMS(g / sqrt(v)) over the parameters; NaN without a second moment.
        underflow: gradients lost in fp16 or fp8; None if not measured.
        fp8: what casts to fp8 lost; None if there are none.
        recheck: the computation that gave another result the second time; None for other kinds.
        update: why the optimizer's step was not finite; None for other kinds, or if it is finite when run again.
        update_ran: whether the optimizer's step was run again.
        setting: the run's settings.
    """

    kind: str
    reading: Reading
    part: RankPart | None = None
    loss_known: bool = True
    parts_normal: bool = False
    samples: Sequence[Mapping[str, Any]] = ()
    damage: Sequence[Damage] = ()
    origin: Origin | None = None
    divisor_ops: Sequence[str] = ()
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    repeats: bool | None = None
    drift: Drift | None = None
    culprits: Culprits | None = None
    sizes: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    largest_input: LargestInput | None = None
    update_length: float = math.nan
    staleness: float = math.nan
    underflow: Underflow | None = None
    fp8: Fp8Casts | None = None
    recheck: Finding | None = None
    update: UpdateFault | None = None
    update_ran: bool = False
    setting: RunSettings = field(default_factory=RunSettings)

    def normal(self, variant: str) -> bool | None:
        """Whether a replay was finite and within the guard's limits; None if it was not run."""
        return self.within_limits(self.outcomes.get(variant))

    def within_limits(self, outcome: Outcome | None) -> bool | None:
        """Whether an outcome is finite and within the guard's limits; None if it was not run."""
        if outcome is None or outcome.finite is None or outcome.loss is None or outcome.grad_norm is None:
            return None
        if not math.isfinite(self.reading.buffers):  # a replay does not measure buffers
            return None
        within = outcome.loss <= self.setting.loss_limit and outcome.grad_norm <= self.setting.norm_limit
        return outcome.finite and within

    def finite(self, variant: str) -> bool | None:
        """Whether a replay was finite; None if it was not run."""
        outcome = self.outcomes.get(variant)
        return None if outcome is None else outcome.finite

    def size(self, name: str) -> float:
        """A metric of the monitors; NaN if it was not measured."""
        return self.sizes.get(f"monitors/{name}", math.nan)

    def grown(self, name: str) -> float:
        """A metric divided by its value on the older state; NaN if either was not measured."""
        before = self.before.get(f"monitors/{name}", math.nan)
        return self.size(name) / before if before else math.nan


FIRST_STEPS = 3
"""Steps in which the initialisation, not training, determines the weights."""

LR_TOO_HIGH = 0.4
"""If a typical parameter moves per step by more than this share of its own RMS, the learning rate is at fault.

For comparison: Adam's first step at the common rate 3e-3 moves weights of std 0.02 by a share of 0.15.
"""

WEIGHTS_RUINED = 3.0
"""If the same share exceeds this, the learning rate is to blame for any failure, at whatever operation it begins."""

FIRST_LOSS_TOO_LARGE = 30.0
"""If the loss of a first step exceeds this, in nats, the initialisation is at fault: guessing among 50,000 costs 11."""

ADAM_SLACK_LRS = 4.0
"""Allowance, in learning rates, for single updates of Adam that are longer than the learning rate."""

USUAL_UPDATE_LENGTH = 1.0
"""Up to this RMS(m / sqrt(v)), the gradients agree with v: the update is at most as long as the learning rate."""

MAX_UPDATE_LENGTH = 1.5
"""Above this RMS(m / sqrt(v)), updates are too long. It is at most about 1 if m and v are equally old."""

INPUT_OUTLIER_RATIO = 20.0
"""An input is an outlier if it is more than this many times the largest input of another batch; as in the guard."""

LOSS_RISEN_RATIO = 100.0
"""If the loss exceeds this multiple of its smallest value, updates have led away from there."""

MAX_DECAY_PER_STEP = 0.5
"""Weight decay is to blame if it removes more than this share of the weights per step."""

HUGE_INPUT = 1e6
"""Inputs above this may overflow inside an operation even in fp64."""

DIVISIONS = ("division_by_zero", "zero_over_zero", "zero_to_negative_power", "inf_minus_inf", "zero_times_inf")
SPREADS = ("var", "std", "var_mean", "std_mean")
LENGTHS = ("linalg_vector_norm", "norm")


def is_spread(ops: Sequence[str]) -> bool:
    """Whether operations compute a variance or standard deviation.

    True also for a mean of squares, and for the length of a vector that is centred or divided by the square root
    of its size. A plain length does not count.

    Args:
        ops: names of the operations, last one first.
    """
    names = [op.removeprefix("aten.").rstrip("_") for op in ops]
    if any(name in SPREADS for name in names):
        return True
    if any(a == "mean" and b in ("pow", "square", "mul") for a, b in itertools.pairwise(names)):
        return True
    at = next((number for number, name in enumerate(names) if name in LENGTHS), None)
    scaled = at is not None and any(name in ("mul", "div") for name in names[1:at])
    return scaled or (at is not None and names[at + 1 : at + 2] == ["sub"])


def finite_in_fp32(e: Evidence) -> bool:
    """Whether the step is finite in fp32."""
    return e.finite("fp32") is True and e.origin is not None and e.origin.in_fp32 is not None


def no_finite_result(e: Evidence) -> bool:
    """Whether the operation has no finite result in fp64 either, for inputs that are finite and not huge."""
    o = e.origin
    if o is None or o.should_have_been is None or math.isfinite(o.should_have_been):
        return False
    return not reads_huge_values(o)


def reads_huge_values(o: Origin) -> bool:
    """Whether an input of the operation is not finite, or so large that the operation may overflow even in fp64."""
    return not all(read.absmax is None or read.absmax < HUGE_INPUT for read in o.inputs)


def has_no_rows(o: Origin) -> bool:
    """Whether the operation read an empty tensor."""
    return any(0 in read.shape for read in o.inputs)


def adds_masks(o: Origin) -> bool:
    """Whether the operation adds two tensors that both hold the largest magnitude of their format: masks."""
    full = [read.absmax == torch.finfo(getattr(torch, read.dtype)).max for read in o.inputs if read.absmax is not None]
    return o.op.rstrip("_") in ("aten.add", "aten.sub") and len(full) == 2 and all(full)


def excess_length(e: Evidence) -> float:
    """Length of the updates in learning rates if it exceeds `MAX_UPDATE_LENGTH`, else 1."""
    return e.update_length if e.update_length > MAX_UPDATE_LENGTH else 1.0


def moved_too_far(e: Evidence) -> bool:
    """Whether most weights have moved further than healthy training moves them."""
    return e.drift is not None and (e.drift.share / excess_length(e) > LR_TOO_HIGH or moved_beyond_lr(e))


def moved_beyond_lr(e: Evidence) -> bool:
    """Whether the weights have moved further than `drift.steps` updates at the learning rate allow."""
    rate = e.setting.values.get("optimizer.lr")
    if e.drift is None or not e.drift.adaptive or not isinstance(rate, int | float):
        return False
    # moments of different ages make updates long without any fault of the learning rate
    return e.drift.moved > rate * (e.drift.steps + ADAM_SLACK_LRS) * excess_length(e)


def moved_first(e: Evidence) -> bool:
    """Whether the weights moved too far first, and the gradients outgrew v only afterwards.

    If v had been out of date, the growing gradients would have made the last update longer than the learning rate.
    """
    return e.update_length <= USUAL_UPDATE_LENGTH and e.normal("older_state") is True


def weights_ruined(e: Evidence) -> bool:
    """Whether updates have ruined the weights, so that the first operation that fails does not show the cause."""
    torn = e.drift is not None and (e.drift.share > WEIGHTS_RUINED or moved_beyond_lr(e))
    return torn and e.normal("older_state") is True


def has_cross_entropy(e: Evidence) -> bool:
    """Whether the loss is the cross-entropy: then a z-loss is possible, and guessing has a known loss."""
    return e.setting.choices.get("objective", "cross_entropy") == "cross_entropy"


def first_loss_too_large(e: Evidence) -> bool:
    """Whether the loss of one of the first steps, computed in fp32, is far above the loss of random guessing."""
    wide = e.outcomes.get("fp32") if has_cross_entropy(e) else None
    return e.reading.step <= FIRST_STEPS and wide is not None and (wide.loss or 0.0) > FIRST_LOSS_TOO_LARGE


def loss_has_risen(e: Evidence) -> bool:
    """Whether updates have made the loss far larger than it was."""
    best = e.setting.best_loss
    return best < math.inf and e.reading.loss > LOSS_RISEN_RATIO * max(best, 0.0) > 0


def has_input_outlier(e: Evidence) -> bool:
    """Whether an input is far larger than the inputs of another batch, and the step is finite with that other batch."""
    found = e.largest_input
    if found is None or not found.largest > INPUT_OUTLIER_RATIO * found.elsewhere > 0:
        return False
    return e.finite("fresh_batch") is True


def outliers(found: LargestInput) -> int:
    """Number of samples whose largest value is far larger than the values of another batch."""
    return sum(size > INPUT_OUTLIER_RATIO * found.elsewhere for size in found.sizes)


def decay_too_strong(e: Evidence) -> bool:
    """Whether weight decay alone ruins the weights."""
    decay, rate = (e.setting.values.get(f"optimizer.{key}") for key in ("weight_decay", "lr"))
    if not isinstance(decay, int | float) or not isinstance(rate, int | float) or decay <= 1:
        return False  # an ordinary decay does no harm: blame the learning rate
    return decay * (1.0 if e.setting.values.get("optimizer.decay") == "independent" else rate) > MAX_DECAY_PER_STEP
