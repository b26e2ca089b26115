"""Limits above which the loss, the gradient norm or the inputs of a step are a spike; and why a step was skipped.

    limit = max(mean + sigma std, ratio mean, share first)       over the last `window` applied steps

`mean + sigma std` is the package's only definition of a spike (`monitors/rolling.py`). The other two terms prevent
false alarms. `ratio` tolerates small fluctuations when the values in the window are nearly equal. `share`, a fraction
of the first step's value, tolerates a single hard sample when the model has memorised its data and losses are near 0.

A window is cold until it is half full: the fast changes of the first steps still dominate its mean and deviation.
Until then the limit is at most `cold` times the first value (3 for the loss, 100 for the gradient norm), and falls
towards the recent values as steps are applied (`early_limit`). Skipped steps never enter a window.

The limit of the gradient norm is also at least `recent` times the median of the last 5 applied norms. A spike is a jump
from the recent level: a norm that grows smoothly, as in the first steps of a GAN, is none, however far it grows. A
single bad step does not move the median.

A loss can be negative, such as the negative log-likelihood of a density. Multiples of it mean nothing then: the limit
is mean + sigma std alone, and there is none while the window is cold.

A skipped step has a kind, which is counted, and a reason in one line:

| kind | |
|---|---|
| `state` | weights, moments or buffers have changed since the last update (`checks/state_check.py`) |
| `bad_data` | the batch cannot be trained on (`stability/sanitize.py`) |
| `update` | the optimizer's step gave values that are not finite, and was undone (`checks/update_check.py`) |
| `overflow` | fp16's scaled gradients are not finite, but the loss is: routine, the loss scale falls |
| `nonfinite` | the loss, the gradient norm or the norm of the buffers is NaN or Inf |
| `recheck` | the gradient differs from that of a second computation (`checks/recheck.py`) |
| `spike` | the loss, the gradient norm or the inputs are above their limits |

If several apply, the first one in this table is named: the others may follow from it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from stabletrain.errors import ConfigError
from stabletrain.monitors.rolling import MINIMUM, Spikes
from stabletrain.records import LARGEST, Reading

LARGEST_NORM = 1e18
"""Largest gradient norm that any limit allows.

A larger one can carry the second moment of Adam beyond fp32 in a few updates (`stability/optimizers/closed.py`).
"""

SMALLEST = 1e-30
"""Lower bound of a value before its logarithm is taken."""

LEVEL = 5
"""Number of applied steps whose median is the recent level of the gradient norm."""

RECENT = 16
"""Number of recent values from which the limit of a cold window is computed; older values are out of date."""

STD_PER_MEDIAN_CHANGE = 1.4826 / math.sqrt(2)
"""Standard deviation of normally distributed values, divided by the median absolute difference of two such values."""


@dataclass(frozen=True)
class LimitFactors:
    """Factors of a quantity's limit; the module's docstring explains `ratio` and `share`.

    Attributes:
        ratio: multiple of the window's mean.
        share: multiple of the first value.
        cold: multiple of the first value while the window is cold.
        prior: number of steps after which the measured spread counts as much as `cold`; inf: the spread never counts.
        firsts: number of applied steps whose median is used as the first value.
        recent: multiple of the median of the last `LEVEL` values: the limit is never below.
        largest: upper bound of the limit, whatever the window holds.
    """

    ratio: float
    share: float
    cold: float
    prior: float = math.inf
    firsts: int = 1
    recent: float = 0.0
    largest: float = LARGEST


# `prior` was chosen with tests/reliability/early_steps.py: of its clean starts, only two exceed a limit, and these
# diverge.
LOSS = LimitFactors(ratio=1.05, share=0.3, cold=3.0, prior=8)
# Gradient norms are heavy-tailed, and clipping bounds their effect: their limits are wide.
NORM = LimitFactors(ratio=20.0, share=3.0, cold=100.0, prior=128, recent=20.0, largest=LARGEST_NORM)
# Images that are 100 times too bright hardly change the loss behind BatchNorm, but damage its running statistics.
# The median of the first values keeps one bad first batch from setting the limit.
INPUTS = LimitFactors(ratio=20.0, share=20.0, cold=20.0, firsts=MINIMUM)


def cold_steps(window: int) -> int:
    """Number of applied steps after which the window is no longer cold."""
    return max(MINIMUM, window // 2)


class Limit:
    """The limit of one quantity.

    Args:
        sigma: standard deviations above the mean; inf disables the limit.
        window: number of applied steps to take statistics over.
        terms: multiples of the mean and of the first value.

    Attributes:
        value: current limit, at most `terms.largest`.
    """

    def __init__(self, sigma: float, window: int, terms: LimitFactors) -> None:
        self._spikes = Spikes(window, sigma, cold_steps(window))
        self._terms = terms
        self._first: list[float] = []
        self._first_median = math.inf
        self.value = terms.largest

    @property
    def warm(self) -> bool:
        """Whether the window is at least half full."""
        return math.isfinite(self._spikes.limit) or math.isinf(self._spikes.sigma)

    def add(self, value: float) -> None:
        """Adds the value of an applied step."""
        if len(self._first) < self._terms.firsts:
            self._note_first([*self._first, value])
        self._spikes.add(value)
        self._update()

    @property
    def signed(self) -> bool:
        """Whether a value was negative, as log-likelihoods of densities are: multiples of it then mean nothing."""
        return self._spikes.window.negative > 0 or any(value < 0 for value in self._first)

    def widened(self, recent: float) -> float:
        """Returns the limit if it is at least this multiple of the recent level, and at most `terms.largest`."""
        level = median_low(self._spikes.window.newest(LEVEL) or [0.0])
        return min(max(self.value, recent * level), self._terms.largest)

    @property
    def size(self) -> float:
        """Limit of the absolute value: the same as `value`, or `LARGEST` if values may be negative."""
        return LARGEST if self.signed else self.value

    def _note_first(self, first: list[float]) -> None:
        self._first = first
        # multiples of 0 would forbid every later value
        self._first_median = (median_low(first) if first else 0.0) or math.inf

    def _update(self) -> None:
        limit, (mean, _), first = self._spikes.limit, self._spikes.window.normal(), self._first_median
        if self.signed:
            if math.isfinite(limit):
                limit = max(limit, mean + (self._terms.ratio - 1) * abs(mean))
        elif math.isfinite(limit):
            limit = max(limit, self._terms.ratio * mean, self._terms.share * first)
        elif math.isfinite(self._spikes.sigma):
            limit = self._terms.cold * first
            if math.isfinite(self._terms.prior):
                early = early_limit(
                    [*self._spikes.window.values], self._terms.cold, self._terms.prior, self._spikes.sigma
                )
                limit = min(limit, max(early, self._terms.share * first))
        self.value = min(limit, self._terms.largest)
        if self._terms.recent:
            self.value = self.widened(self._terms.recent)

    def state_dict(self) -> dict:
        """Window and first values, for the checkpoint."""
        return {"window": self._spikes.state_dict(), "first": list(self._first)}

    def load_state_dict(self, state: dict) -> None:
        """Restores window and first values."""
        self._spikes.load_state_dict(state["window"])
        self._note_first(list(state["first"]))
        if self._first:
            self._update()
        else:  # saved before the first applied step: discard the limit of this object's own history
            self.value = self._terms.largest


def early_limit(values: Sequence[float], cold: float, prior: float, sigma: float) -> float:
    """Returns the limit while the window is cold: median x exp(sigma std), over the last `RECENT` values.

        std² = (prior · (log(cold) / sigma)² + n · spread²) / (prior + n)

    `spread` is a robust standard deviation of the logarithms, computed from the median of their absolute changes from
    step to step, so neither a trend (a warmup, a falling loss) nor a few outliers widen it. n is the number of steps so
    far, minus 1. With a single value, the limit is `cold` times this value.

    Args:
        values: all values so far, oldest first.
    """
    logs = [math.log(max(value, SMALLEST)) for value in values[-RECENT:]]
    changes = [abs(later - earlier) for earlier, later in itertools.pairwise(logs)]
    spread, count = STD_PER_MEDIAN_CHANGE * median(changes or [0.0]), len(values) - 1
    variance = (prior * (math.log(cold) / sigma) ** 2 + count * spread**2) / (prior + count)
    exponent = median(logs) + sigma * math.sqrt(variance)
    return math.exp(min(exponent, math.log(LARGEST)))


MIN_SIGMA = 1
"""Smallest `guard.sigma`: of normally distributed losses, one in six is higher above the mean than this."""


class Limits:
    """The limits of loss, gradient norm and magnitude of the inputs.

    Attributes:
        cold_steps: number of applied steps after which the windows are no longer cold.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, sigma: float, window: int) -> None:
        if not sigma >= MIN_SIGMA:
            raise ConfigError(
                f"guard.sigma={sigma} is below {MIN_SIGMA}: ordinary steps would be skipped as spikes; 6 is "
                "customary; inf disables spike detection"
            )
        if window < MINIMUM:
            raise ConfigError(
                f"guard.window={window} is below {MINIMUM}: too few steps for a mean and a standard deviation"
            )
        self.cold_steps = cold_steps(window)
        self.loss, self.norm = Limit(sigma, window, LOSS), Limit(sigma, window, NORM)
        self.inputs = Limit(sigma, window, INPUTS)

    def add(self, reading: Reading) -> None:
        """Adds an applied step."""
        self.loss.add(reading.loss)
        self.norm.add(reading.grad_norm)
        self.inputs.add(reading.inputs)

    def exceeded(self, reading: Reading) -> str:
        """Names the limit that a skipped step exceeded, with value and limit."""
        measured = (("loss", reading.loss, self.loss), ("gradient norm", reading.grad_norm, self.norm))
        for what, value, limit in (*measured, ("an input of magnitude", reading.inputs, self.inputs)):
            if not value <= limit.value:
                return f"{what} {value:.4g} is a spike, above {limit.value:.4g}"
        return "a spike"

    def state_dict(self) -> dict:
        """Windows and first values, for the checkpoint."""
        return {"loss": self.loss.state_dict(), "norm": self.norm.state_dict(), "inputs": self.inputs.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restores windows and first values."""
        self.loss.load_state_dict(state["loss"])
        self.norm.load_state_dict(state["norm"])
        self.inputs.load_state_dict(state["inputs"])


KINDS = ("bad_data", "nonfinite", "spike", "overflow", "state", "recheck", "update")
"""All kinds, in the order in which they are logged."""

CHANGED = "weights, moments or buffers are not what the last update left"
GRADIENT_DIFFERS = "the gradient came out differently when it was computed a second time"
BAD_UPDATE = "the optimizer's step gave values that are not finite, from a finite gradient"
UPDATE_DIFFERS = "the optimizer's update came out differently when it was computed a second time"


def overflow_reason(reading: Reading) -> str:
    """Describes in one line an update that fp16's loss scaling skipped."""
    return f"fp16 overflow at loss scale {reading.loss_scale:g}: the scale is lowered"


def kind_and_reason(reading: Reading, limits: Limits, *, gradient_differs: bool) -> tuple[str, str]:
    """Returns kind and reason of a skipped step.

    Args:
        reading: of the step.
        limits: those that hold in this step.
        gradient_differs: whether its gradient differs from that of a second computation.
    """
    if reading.state_changed:
        return "state", CHANGED
    if reading.bad_data:
        return "bad_data", "the batch holds data that cannot be trained on"
    if reading.bad_update:
        return "update", BAD_UPDATE
    if reading.overflow:
        return "overflow", overflow_reason(reading)
    measured = (
        ("loss", reading.loss),
        ("gradient norm", reading.grad_norm),
        ("norm of the buffers", reading.buffers),
    )
    for what, value in measured:
        if not math.isfinite(value):
            return "nonfinite", f"{what} is {value}"
    if gradient_differs:
        return "recheck", GRADIENT_DIFFERS
    return "spike", limits.exceeded(reading)
