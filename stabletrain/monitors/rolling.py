"""Rolling statistics of the readings: clip rate, skip rate and spike score.

    z(x) = (x - mean) / std       over the previous `window` values, without x itself
    spike score = share of values with |z| >= sigma
    update z-score = z(length of the update / learning rate)

Source: OLMo 2, arXiv 2501.00656, section 3.1 (window 1,000, seven standard deviations), for losses and gradient norms.
This is the package's only definition of a spike.

The standard deviation is the population's (divided by n). Both sums of a window are exact integers, so they depend on
the values in it alone, never on those that it held before, and a new value costs the same however long it is.

No value of a skipped step enters a window. A step that the guard skipped as a spike counts as a spike in both scores,
also after a rollback. Other skipped steps count only towards the skip rate.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from stabletrain.records import Reading

MINIMUM = 20
"""Minimum number of values in the window before a new one is judged: fewer give a poor standard deviation."""

RESOLUTION = 2.0**-23
"""Lower bound of the standard deviation, relative to the mean: readings are fp32, so less is rounding error."""


UNIT = 1074
"""Every float is an integer multiple of 2**-UNIT."""


def in_units(value: float) -> int:
    """Returns a finite value as a multiple of 2**-UNIT, exactly."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << UNIT + 1 - denominator.bit_length()


class Window:
    """The last values of a series, with their mean and standard deviation.

    Attributes:
        size: largest number of values.
        values: finite values, oldest first.
        negative: how many of them are below 0.
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self.values: deque[float] = deque(maxlen=size)
        self.negative = self._sum = self._squares = 0
        self._known: tuple[float, float] | None = None
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        """Number of values."""
        return len(self.values)

    def add(self, value: float) -> None:
        """Adds a finite value; the oldest one leaves a full window."""
        if len(self.values) == self.size:
            self._count(self.values[0], -1)
        self.values.append(value)
        self._count(value, 1)
        self._known = None

    def _count(self, value: float, sign: int) -> None:
        units = in_units(value)
        self._sum += sign * units
        self._squares += sign * units * units
        self.negative += sign * (value < 0)

    def newest(self, count: int) -> list[float]:
        """Returns the newest values, oldest first."""
        return [*islice(reversed(self.values), count)][::-1]

    def normal(self) -> tuple[float, float]:
        """Returns mean and standard deviation; 0 and 0 without values."""
        if self._known is None:  # a step asks for them several times
            count = len(self.values) or 1
            mean = self._sum / (count << UNIT)
            # n sum(x^2) - sum(x)^2 of integers loses nothing, and the one division is rounded correctly.
            try:
                deviation = math.sqrt((count * self._squares - self._sum**2) / (count**2 << 2 * UNIT))
            except OverflowError:  # the variance is above the largest float
                deviation = math.inf
            self._known = mean, max(deviation, RESOLUTION * abs(mean))
        return self._known


class Spikes:
    """A rolling window of values that counts spikes.

    If all values in the window are equal, their standard deviation is taken as the mean's fp32 resolution: a change in
    the last bit is not a spike, and any larger change is. If all are 0, any other value is infinitely far away.

    Args:
        window: number of values in the window.
        sigma: standard deviations from the mean at which a spike begins.
        minimum: values in the window before the first value is judged.

    Raises:
        ValueError: 2 <= `minimum` <= `window` does not hold, or `sigma` is not above 0.
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
        self._window = Window(window)

    def z(self, value: float) -> float:
        """Returns how many standard deviations `value` is above the window's mean; negative below it.

        Inf for a value that is not finite; 0 for any other value if the window holds fewer than `minimum` values.
        """
        if not math.isfinite(value):
            return math.inf
        if len(self._window) < self.minimum:
            return 0.0
        mean, deviation = self._window.normal()
        distance = value - mean
        if deviation == 0.0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / deviation

    @property
    def limit(self) -> float:
        """Value at which a spike begins: mean + sigma std of the window; inf with fewer than `minimum` values in it."""
        if len(self._window) < self.minimum:
            return math.inf
        mean, deviation = self._window.normal()
        return mean + self.sigma * deviation if deviation else mean

    @property
    def window(self) -> Window:
        """The last values."""
        return self._window

    def add(self, value: float) -> float:
        """Judges and counts `value`, then adds it to the window; returns its z.

        Values that are not finite are neither counted nor added. Finite spikes are counted and added. To keep a spike
        out of the window, do not call this method with it.
        """
        distance = self.z(value)
        if not math.isfinite(value):
            return distance
        # Finite spikes enter the window: if the loss has moved for good, the new level must become normal.
        if len(self._window) >= self.minimum:
            self.judged += 1
            self.spikes += abs(distance) >= self.sigma
        self._window.add(value)
        return distance

    def count_skipped(self) -> None:
        """Counts a spike whose step was skipped; the window stays as it is."""
        self.judged += 1
        self.spikes += 1

    @property
    def score(self) -> float:
        """Share of the judged values that were spikes, in [0, 1]; 0 if none was judged."""
        return self.spikes / self.judged if self.judged else 0.0

    def state_dict(self) -> dict:
        """Window, oldest value first, and counts, for the checkpoint."""
        return {"values": list(self._window.values), "judged": self.judged, "spikes": self.spikes}

    def load_state_dict(self, state: dict) -> None:
        """Restores them; the newest values if the stored window is longer."""
        self._window = Window(self._window.size, state["values"])
        self.judged, self.spikes = state["judged"], state["spikes"]


WINDOW = 200
"""Steps over which the clip fraction and the skip rate are taken."""

OFTEN = 5
"""Skipped steps in the window that raise an alarm; fp16's overflows do not count."""

NEARLY_ALWAYS = 0.95
"""Clip fraction over a full window that raises an alarm."""

SKIPS = (
    "{} of the last {} steps were skipped: none of these updates was applied, but something is wrong; events.jsonl "
    "lists each; lower optimizer.lr, or inspect the data"
)

CLIPPING = (
    "clipping was active in {:.0%} of the last {} updates: most gradient norms exceed its bound, so the bound sets the "
    "size of every update; lower optimizer.lr or raise the clipping's bound; if one part of the model causes it, use "
    "clipping=per_module"
)


@dataclass(frozen=True)
class Alarm:
    """A warning that is shown once in a run.

    Attributes:
        kind: `clipping`, `skips`, `explosion`, `vanishing`, `attention` or `monitors`; or a kind of slow spike
            (`guard/policy/slow.py`), which is shown once for each change; or `left_out` (`guard/policy/kept.py`). In a
            user's loop also `norm_level` and `coupled_spike` (`guard/policy/high_norms.py`), `scaled_clipping` and
            `lost_moments` (`guard/loop_mistakes.py`).
        text: one line: what happened, where, and what to try.
        since: step at which it began, as far as it is known; None if that means nothing.
    """

    kind: str
    text: str
    since: int | None = None


class RollingStats:
    """Statistics of the last readings.

    Args:
        window: number of steps over which the clip fraction (applied steps) and the skip rate (all steps) are taken.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._active: deque[float] = deque(maxlen=window)
        self._applied: deque[bool] = deque(maxlen=window)
        self._fallen: deque[bool] = deque(maxlen=window)
        self._spikes = {"loss": Spikes(), "grad_norm": Spikes()}
        # Lengths over the learning rate: warmup and schedule are no outliers.
        self._updates, self._update_z = Spikes(), 0.0
        self._raised: list[str] = []

    def add(self, reading: Reading, skipped_spike: bool = False) -> list[Alarm]:
        """Adds a step; returns new alarms: each kind is raised once in a run.

        Args:
            skipped_spike: whether the guard skipped the step as a spike.
        """
        self._applied.append(reading.applied)
        self._fallen.append(not reading.applied and not reading.overflow)
        if not reading.applied:
            if skipped_spike:  # the guard's window is shorter than the scores', so the scores may not see this spike
                for spikes in self._spikes.values():
                    spikes.count_skipped()
            fallen = sum(self._fallen)
            return self._raise("skips", SKIPS.format(fallen, len(self._fallen))) if fallen >= OFTEN else []
        self._active.append(reading.clip_active)
        self._spikes["loss"].add(reading.loss)
        self._spikes["grad_norm"].add(reading.grad_norm)
        if reading.update > 0 and reading.lr > 0:
            self._update_z = self._updates.add(reading.update / reading.lr)
        if "clipping" in self._raised or len(self._active) < self._window:
            return []
        active = mean(self._active)
        return self._raise("clipping", CLIPPING.format(active, self._window)) if active >= NEARLY_ALWAYS else []

    def _raise(self, kind: str, text: str) -> list[Alarm]:
        if kind in self._raised:
            return []
        self._raised.append(kind)
        return [Alarm(kind, text)]

    def metrics(self) -> dict[str, float]:
        """Returns `clip/fraction` and `guard/skip_rate` of the window and the run's spike scores, all in [0, 1].

        If updates are measured (`update_length.py`), also `update/zscore` of the last applied one.
        """
        return {
            "clip/fraction": mean(self._active),
            "guard/skip_rate": 1 - mean(self._applied) if self._applied else 0.0,
            "spike/score": self._spikes["loss"].score,
            "spike/grad_norm_score": self._spikes["grad_norm"].score,
            **({"update/zscore": self._update_z} if len(self._updates.window) else {}),
        }

    def state_dict(self) -> dict:
        """Returns the windows (oldest step first) and the raised alarms, for a checkpoint."""
        return {
            "active": list(self._active),
            "applied": list(self._applied),
            "fallen": list(self._fallen),
            "spikes": {name: spikes.state_dict() for name, spikes in self._spikes.items()},
            "updates": {**self._updates.state_dict(), "z": self._update_z},
            "raised": list(self._raised),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores the windows and the alarms from a checkpoint."""
        self._active = deque(state["active"], maxlen=self._active.maxlen)
        self._applied = deque(state["applied"], maxlen=self._applied.maxlen)
        self._fallen = deque(state.get("fallen", []), maxlen=self._fallen.maxlen)
        for name, spikes in self._spikes.items():
            spikes.load_state_dict(state["spikes"][name])
        updates = state.get(
            "updates", {"values": [], "judged": 0, "spikes": 0, "z": 0.0}
        )  # older checkpoints have none
        self._updates.load_state_dict(updates)
        self._update_z = updates["z"]
        self.load_cumulative_state(state)

    def cumulative_state(self) -> dict:
        """Returns what a rollback does not undo: the raised alarms (none is raised twice) and the counts of spikes."""
        counts = {name: [spikes.judged, spikes.spikes] for name, spikes in self._spikes.items()}
        return {"raised": list(self._raised), "counts": counts}

    def load_cumulative_state(self, state: dict) -> None:
        """Overwrites the restored alarms and counts with those from before the rollback."""
        self._raised = list(state["raised"])
        # A checkpoint has these counts only if it was written when the run halted.
        for name, (judged, spikes) in state.get("counts", {}).items():
            self._spikes[name].judged, self._spikes[name].spikes = judged, spikes


def mean(values: deque) -> float:
    """Returns the mean of numbers or flags; 0 if there are none."""
    return sum(values) / len(values) if values else 0.0
