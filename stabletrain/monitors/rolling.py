"""Statistics of the last steps, from their readings: clip rate, skip rate, and the spike score.

    z(x) = (x - mean) / std       over the previous `window` values, without x itself
    spike score = share of values with |z| >= sigma

Source: OLMo 2, arXiv 2501.00656, section 3.1 (window 1,000, seven standard deviations), for losses and gradient norms.
This is the package's only definition of a spike.

Mean and standard deviation (divided by n) are recomputed from the window each time, in two passes and float64: a
running sum would keep the rounding error of every huge value that passed through it. Skipped steps count in the skip
rate only. It costs some microseconds a step and is always on.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stabletrain.records import Reading

MINIMUM = 20
"""Values before anything is judged: with fewer the standard deviation is itself a guess."""

RESOLUTION = 2.0**-23
"""Lowest standard deviation, as a share of the mean: readings are fp32, so below it there is only rounding."""


class Spikes:
    """A window of values, and how many of those that passed through it were spikes.

    Where all values of the window are equal, their standard deviation counts as the mean's fp32 resolution, so that a
    change of one unit in the last place is no spike and any real change is one. A window of zeros has no resolution:
    any other value is then infinitely far.

    Args:
        window: values that are remembered.
        sigma: standard deviations from which on a value is a spike.
        minimum: values in the window before one is judged, at most `window`.

    Raises:
        ValueError: `window` or `minimum` below 2, `minimum` above `window`, or `sigma` not above 0.
    """

    def __init__(self, window: int = 1000, sigma: float = 7.0, minimum: int = MINIMUM) -> None:
        if not 2 <= minimum <= window:
            raise ValueError(f"minimum={minimum} and window={window} do not satisfy 2 <= minimum <= window")
        if not sigma > 0:
            raise ValueError(f"sigma={sigma} is not above 0")
        self.sigma = sigma
        self.minimum = minimum
        self.judged = 0
        self.spikes = 0
        self._values: deque[float] = deque(maxlen=window)
        self._known: tuple[float, float] | None = None

    def z(self, value: float) -> float:
        """Standard deviations of `value` above the window's mean, negative below it.

        A value that is not finite is infinitely far above. With fewer than `minimum` values in the window a finite
        value is 0 away: nothing is known yet.
        """
        if not math.isfinite(value):
            return math.inf
        if len(self._values) < self.minimum:
            return 0.0
        mean, deviation = self._normal()
        distance = value - mean
        if deviation == 0.0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / deviation

    @property
    def limit(self) -> float:
        """Where spikes begin: mean + sigma std of the window; infinite with fewer than `minimum` values in it."""
        if len(self._values) < self.minimum:
            return math.inf
        mean, deviation = self._normal()
        return mean + self.sigma * deviation if deviation else mean

    @property
    def mean(self) -> float:
        """Mean of the window; 0 of an empty one."""
        return self._normal()[0] if self._values else 0.0

    def _normal(self) -> tuple[float, float]:
        """Mean and standard deviation of the window, kept until it changes: they are asked for several times a step."""
        if self._known is None:
            self._known = self._measured()
        return self._known

    def _measured(self) -> tuple[float, float]:
        values = np.fromiter(self._values, np.float64, len(self._values))
        mean = float(values.mean())
        return mean, max(float(values.std()), RESOLUTION * abs(mean))

    def add(self, value: float) -> float:
        """Judges `value` by the window, counts it, and takes it in; returns its z.

        A value that is not finite is neither counted nor taken in. A finite spike is: the loss of a run that has moved
        for good must become the new normal. Who wants it out does not add it.
        """
        distance = self.z(value)
        if not math.isfinite(value):
            return distance
        if len(self._values) >= self.minimum:
            self.judged += 1
            self.spikes += abs(distance) >= self.sigma
        self._values.append(value)
        self._known = None
        return distance

    @property
    def score(self) -> float:
        """Share of the judged values that were spikes, in [0, 1]; 0 before any was judged."""
        return self.spikes / self.judged if self.judged else 0.0

    def state_dict(self) -> dict:
        """Window, oldest value first, and counts."""
        return {"values": list(self._values), "judged": self.judged, "spikes": self.spikes}

    def load_state_dict(self, state: dict) -> None:
        """Puts them back; of a longer window the newest values."""
        self._values, self._known = deque(state["values"], maxlen=self._values.maxlen), None
        self.judged, self.spikes = state["judged"], state["spikes"]


def spike_score(values: Iterable[float], window: int = 1000, sigma: float = 7.0, minimum: int = MINIMUM) -> float:
    """The spike score of a finished run's values, those of skipped steps left out: the same number as `Spikes` gives.

    Raises:
        ValueError: as `Spikes`.
    """
    spikes = Spikes(window, sigma, minimum)
    for value in values:
        spikes.add(value)
    return spikes.score


WINDOW = 200
"""Steps over which shares are taken."""

OFTEN = 5
"""Skips, for whatever but fp16's calibration, among the last steps from which on a person should know."""

NEARLY_ALWAYS = 0.95
"""Clip fraction over a full window from which on clipping is no exception any more."""

SKIPS = (
    "{} of the last {} steps were skipped: something is going wrong, though none of these updates has reached the "
    "weights; events.jsonl names each; lower optimizer.lr, or look at the data"
)

CLIPPING = (
    "clipping was active in {:.0%} of the last {} updates: gradients are as a rule longer than its bound, which then "
    "sets the length of every update; lower optimizer.lr or raise the clipping's bound; where one part of the model is "
    "to blame, use clipping=per_module"
)


@dataclass(frozen=True)
class Alarm:
    """Something a person should know once.

    Attributes:
        kind: what, in one word: `clipping`, `skips`, `explosion`, `vanishing`, `attention`, `monitors`.
        text: one line: what, where, what to try.
    """

    kind: str
    text: str


class RollingStats:
    """The last steps' readings, summed up.

    Args:
        window: steps over which the clip fraction (applied steps) and the skip rate (all steps) are taken.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._active: deque[float] = deque(maxlen=window)
        self._applied: deque[bool] = deque(maxlen=window)
        self._fallen: deque[bool] = deque(maxlen=window)
        self._spikes = {"loss": Spikes(), "grad_norm": Spikes()}
        self._raised: list[str] = []

    def add(self, reading: Reading) -> list[Alarm]:
        """Takes in a step; returns the alarms it raises, each kind once in a run."""
        self._applied.append(reading.applied)
        self._fallen.append(not reading.applied and not reading.overflow)
        if not reading.applied:
            return self._raise("skips", sum(self._fallen) >= OFTEN, SKIPS.format(sum(self._fallen), len(self._fallen)))
        self._active.append(reading.clip_active)
        self._spikes["loss"].add(reading.loss)
        self._spikes["grad_norm"].add(reading.grad_norm)
        always = len(self._active) == self._active.maxlen and mean(self._active) >= NEARLY_ALWAYS
        return self._raise("clipping", always, CLIPPING.format(mean(self._active), len(self._active)))

    def _raise(self, kind: str, condition: bool, text: str) -> list[Alarm]:
        if not condition or kind in self._raised:
            return []
        self._raised.append(kind)
        return [Alarm(kind, text)]

    def metrics(self) -> dict[str, float]:
        """`clip/fraction` and `guard/skip_rate` over the window, and the spike scores of the run; all in [0, 1]."""
        return {
            "clip/fraction": mean(self._active),
            "guard/skip_rate": 1 - mean(self._applied) if self._applied else 0.0,
            "spike/score": self._spikes["loss"].score,
            "spike/grad_norm_score": self._spikes["grad_norm"].score,
        }

    def state_dict(self) -> dict:
        """Windows, oldest step first, and the alarms raised."""
        return {
            "active": list(self._active),
            "applied": list(self._applied),
            "fallen": list(self._fallen),
            "spikes": {name: spikes.state_dict() for name, spikes in self._spikes.items()},
            "raised": list(self._raised),
        }

    def load_state_dict(self, state: dict) -> None:
        """Puts them back."""
        self._active = deque(state["active"], maxlen=self._active.maxlen)
        self._applied = deque(state["applied"], maxlen=self._applied.maxlen)
        self._fallen = deque(state.get("fallen", []), maxlen=self._fallen.maxlen)
        for name, spikes in self._spikes.items():
            spikes.load_state_dict(state["spikes"][name])
        self._raised = list(state["raised"])

    def cumulative_state(self) -> dict:
        """What a rollback does not undo: an alarm that was raised is not raised again."""
        return {"raised": list(self._raised)}

    def load_cumulative_state(self, state: dict) -> None:
        """Puts that back over a restored state."""
        self._raised = list(state["raised"])


def mean(values: deque) -> float:
    """Mean of numbers or flags; 0 of none."""
    return sum(values) / len(values) if values else 0.0
