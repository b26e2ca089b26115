"""The plain facts of an incident: what replays gave, which samples are to blame, what has changed in the state.

They hold numbers and names only, so that probes, diagnosis and both kinds of subject can pass them on.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stabletrain.records import RankPart, Reading

ROUNDING = 0.05
"""Relative difference up to which a rank's replay agrees with its part of the step.

The replay may run other kernels than the step, because it is not compiled and not sharded. A fault that makes a step a
spike changes the numbers of its rank far more.
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a replay. If it was not run, every field except `not_run` is None.

    Attributes:
        finite: whether loss and gradient norm are finite.
        loss, grad_norm: as in a reading: mean over the step, before clipping.
        bitwise_equal_to_reading: for `same`, whether loss and gradient norm equal the step's; None for other variants,
            and if the bits are not comparable, for example because only the step was compiled. False proves a hardware
            fault only with `determinism=strict`. On several ranks, the rank's own part is compared: None if it agrees
            within `ROUNDING`, False if it does not.
        zero_gradients: share of gradient elements that are exactly 0, in [0, 1].
        seconds: duration of the replay.
        not_run: why the replay was not run; empty if it was.
    """

    finite: bool | None = None
    loss: float | None = None
    grad_norm: float | None = None
    bitwise_equal_to_reading: bool | None = None
    zero_gradients: float | None = None
    seconds: float | None = None
    not_run: str = ""


@dataclass(frozen=True)
class Culprits:
    """The smallest part of a batch found to make its step non-finite.

    Attributes:
        samples: indices in the batch, in order; empty if the step is finite or could not be replayed.
        alone: whether each sample fails by itself. Otherwise they fail only together, or the search was cut off.
        passes: how often the model was run.
        others_too: whether another batch fails as well, so that no sample is to blame.
    """

    samples: list[int]
    alone: bool
    passes: int
    others_too: bool = False


@dataclass(frozen=True)
class Damage:
    """Corruption of one tensor of the state, from before the step.

    Attributes:
        what: `parameter`, `buffer` or the name of a moment.
        name: of the parameter or buffer.
        words: description with numbers.
        few: whether only a few elements are affected. An update would change them all.
        large: whether the elements are finite but far larger than before.
    """

    what: str
    name: str
    words: str
    few: bool = False
    large: bool = False


@dataclass(frozen=True)
class Drift:
    """Change of the weights since an older state, or by the last update where no older state is kept.

    Attributes:
        steps: number of steps since the older state; 1 if it is the last update.
        moved: RMS of the change of a parameter; median over the parameters.
        share: RMS of the change, divided by the parameter's older RMS, per step; median over the parameters.
        grown: RMS of a parameter, divided by its older RMS; median over the parameters.
        adaptive: whether an update moves each element by at most about the learning rate, as in Adam.
    """

    steps: int
    moved: float
    share: float
    grown: float
    adaptive: bool


@dataclass(frozen=True)
class LargestInput:
    """The sample with the largest value of a floating-point batch, compared with another batch.

    Attributes:
        sample: its `index` in the batch, and `id` and `source` if the data provides them.
        elsewhere: magnitude of the largest value in another batch.
        sizes: magnitude of the largest value of each sample.
        place: the tensor of the batch that holds it, as in ` in its target`; empty for the inputs.
    """

    sample: Mapping[str, Any]
    largest: float
    elsewhere: float
    sizes: Sequence[float] = ()
    place: str = ""


def largest_value(sizes: Sequence[float], elsewhere: float, place: str = "") -> LargestInput:
    """Returns the sample with the largest of these magnitudes, one a sample; its `sample` has the index only."""
    index = max(range(len(sizes)), key=sizes.__getitem__)
    return LargestInput({"index": index}, sizes[index], elsewhere, sizes, place)


def most_unusual(found: Sequence[LargestInput]) -> LargestInput | None:
    """Returns the one that exceeds the other batch by the largest factor; None if there is none."""
    return max(found, key=lambda each: each.largest / each.elsewhere if each.elsewhere else 0.0, default=None)


def compared(outcome: Outcome, reading: Reading | None, part: RankPart | None, comparable: bool) -> Outcome:
    """Returns the outcome of an unchanged replay, compared with the step; see `Outcome.bitwise_equal_to_reading`.

    Args:
        reading: the step's; None if unknown.
        part: this rank's own part of the step; None in a single process.
        comparable: whether the bits must be equal.
    """
    loss, norm = outcome.loss, outcome.grad_norm
    if loss is None or norm is None:
        return outcome
    equal = None
    if part is not None:
        agrees = nearly_equal(loss, part.loss) and (part.grad_norm is None or nearly_equal(norm, part.grad_norm))
        equal = None if agrees else False
    elif reading is not None and comparable:
        equal = same_bits(loss, reading.loss) and same_bits(norm, reading.grad_norm)
    return replace(outcome, bitwise_equal_to_reading=equal)


def nearly_equal(a: float, b: float) -> bool:
    """Whether two numbers differ by rounding only; all non-finite numbers count as equal."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return math.isclose(a, b, rel_tol=ROUNDING, abs_tol=1e-12)


def same_bits(a: float, b: float) -> bool:
    """Whether two numbers are bitwise equal; all NaNs count as equal."""
    return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
