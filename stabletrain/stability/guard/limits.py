"""Limits: from which loss, gradient norm and input on a step is a spike, taken from the steps that were applied before.

    limit = max(mean + sigma std, ratio mean, share first)       over the last `window` applied steps

`mean + sigma std` is the package's one definition of a spike (`monitors/rolling.py`). The two other terms are what
keeps clean runs clean: a window of nearly equal values makes nothing of a wobble (`ratio`), and a model that has learnt
its data by heart has losses near 0, beside which a single hard sample is a giant (`share` of the first step's value).
Gradient norms are heavy-tailed by nature, and clipping bounds what they do; so their terms are wide. Inputs are limited
too: BatchNorm hides images a hundred times too bright from the loss, and its statistics stay poisoned long after.

A window is cold until it is half full. Until then the first step's values protect: a loss three times as large, or a
gradient norm a hundred times, is no start of a training. A step that was withheld never enters.
"""

import math
from dataclasses import dataclass
from statistics import median_low

from stabletrain.errors import ConfigError
from stabletrain.monitors.rolling import MINIMUM, Spikes
from stabletrain.records import Reading

LARGEST = 3.4e38
"""Below fp32's largest number: a comparison with it is false for NaN and for Inf."""


@dataclass(frozen=True)
class Terms:
    """How far above the mean, above the first value, and in a cold window above the first value a spike begins."""

    ratio: float
    share: float
    cold: float
    firsts: int = 1


LOSS = Terms(ratio=1.05, share=0.3, cold=3.0)
NORM = Terms(ratio=20.0, share=3.0, cold=100.0)
INPUTS = Terms(ratio=20.0, share=20.0, cold=20.0, firsts=MINIMUM)


class Limit:
    """The limit of one quantity.

    Args:
        sigma: standard deviations; infinite for no limit at all.
        window: applied steps it is taken from.
        terms: see the module.

    Attributes:
        value: the limit in force, at most `LARGEST`.
    """

    def __init__(self, sigma: float, window: int, terms: Terms) -> None:
        self._spikes = Spikes(window, sigma, max(MINIMUM, window // 2))
        self._terms = terms
        self._first: list[float] = []
        self.value = LARGEST

    def add(self, value: float) -> None:
        """Takes in the value of an applied step."""
        if len(self._first) < self._terms.firsts:
            self._first.append(value)
        self._spikes.add(value)
        self._update()

    def _update(self) -> None:
        limit = self._spikes.limit
        first = median_low(self._first) or math.inf  # 0 protects nothing
        if math.isfinite(limit):
            limit = max(limit, self._terms.ratio * self._spikes.mean, self._terms.share * first)
        elif math.isfinite(self._spikes.sigma):
            limit = self._terms.cold * first
        self.value = min(limit, LARGEST)

    def state_dict(self) -> dict:
        """Window and first value."""
        return {"window": self._spikes.state_dict(), "first": list(self._first)}

    def load_state_dict(self, state: dict) -> None:
        """Puts them back."""
        self._spikes.load_state_dict(state["window"])
        self._first = list(state["first"])
        if self._first:
            self._update()


class Limits:
    """The limits of loss, gradient norm and magnitude of the inputs.

    Args:
        sigma: standard deviations above the mean from which on a value is a spike.
        window: applied steps over which mean and deviation are taken.

    Attributes:
        loss, norm, inputs: each a `Limit`.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(self, sigma: float, window: int) -> None:
        if not sigma > 0:
            raise ConfigError(f"guard.sigma={sigma} is not above 0: 6 is customary; inf takes no spike for one")
        if window < MINIMUM:
            raise ConfigError(
                f"guard.window={window} is below {MINIMUM}: mean and deviation of so few values say little"
            )
        self.loss, self.norm = Limit(sigma, window, LOSS), Limit(sigma, window, NORM)
        self.inputs = Limit(sigma, window, INPUTS)

    def add(self, reading: Reading) -> None:
        """Takes in an applied step."""
        self.loss.add(reading.loss)
        self.norm.add(reading.grad_norm)
        self.inputs.add(reading.inputs)

    def passed(self, reading: Reading) -> str:
        """Which limit a withheld step has passed, in words."""
        measured = (("loss", reading.loss, self.loss), ("gradient norm", reading.grad_norm, self.norm))
        for what, value, limit in (*measured, ("an input of magnitude", reading.inputs, self.inputs)):
            if not value <= limit.value:
                return f"{what} {value:.4g} is a spike, above {limit.value:.4g}"
        return "a spike"

    def state_dict(self) -> dict:
        """The windows, for the checkpoint."""
        return {"loss": self.loss.state_dict(), "norm": self.norm.state_dict(), "inputs": self.inputs.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """The windows, from a checkpoint."""
        self.loss.load_state_dict(state["loss"])
        self.norm.load_state_dict(state["norm"])
        self.inputs.load_state_dict(state["inputs"])
