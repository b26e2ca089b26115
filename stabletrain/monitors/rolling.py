"""What the last steps were like, from their readings alone: how often clipped, how often withheld, how spiky.

It costs some microseconds a step and is always on. Steps whose update was withheld count in the skip rate and in
nothing else.
"""

from collections import deque
from dataclasses import dataclass

from stabletrain.monitors.spikes import Spikes
from stabletrain.records import Reading

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
