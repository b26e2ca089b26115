"""Evidence: everything that was found out about an incident, in numbers and words; what rules decide by."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stabletrain.forensics.guilty import Guilty
from stabletrain.forensics.origin import Origin
from stabletrain.forensics.replay import Outcome
from stabletrain.forensics.underflow import Underflow
from stabletrain.records import Reading


@dataclass(frozen=True)
class Setting:
    """What the run is set to, as far as a fix may touch it.

    Attributes:
        choices: option by config group.
        values: value by dotted key: `optimizer.lr`, `warmup.steps`.
        attends: whether the model takes QK-norm and softcap.
        warmup: steps of warmup.
        loss_limit, norm_limit: the guard's limits at the time.
        deterministic: whether the same step must give the same bits here.
    """

    choices: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    attends: bool = False
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
class Loudest:
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
        guilty: which samples make the step non-finite.
        sizes: the monitors' metrics on this step's state and batch; `before` on an older state.
        before: see `sizes`.
        loudest: the sample with the largest input; None for ids, or where there is no other batch to compare with.
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
    guilty: Guilty | None = None
    sizes: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    loudest: Loudest | None = None
    overlong: float = math.nan
    staleness: float = math.nan
    underflow: Underflow | None = None
    setting: Setting = field(default_factory=Setting)

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
