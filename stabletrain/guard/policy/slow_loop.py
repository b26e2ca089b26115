"""Slow spikes of a user's own loop, of whose loss, optimizer and data nothing is known.

A loss that is minimized falls or stays. Its trend, and those of gradient norm and update, are judged as in `slow.py`,
with scales for heavy tails, and a rise must last (`SustainedRise`). A rise is none if it comes back at a constant
interval, as after each synchronisation of a target network. Other losses have no trend to judge: those of a policy
gradient, which grow with the episode, adversarial ones, and all that have ever been negative (rewards, critics,
densities).

Weights are judged by what holds for every optimizer, by the triangle inequality:

    | |w_after| - |w_before| |  <=  |w_after - w_before|  =  update

A change beyond that did not come from the step. It is an alarm once, unless the loop has made one in its first `FIRST`
measured steps: then it does so itself, as by clamping or averaging weights.
"""

from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.guard.policy.slow import THRESHOLDS, NoSlowSpikes, SlowSpikes, slow_spikes
from stabletrain.monitors.change_point import FIRST, ChangePoint, SustainedRise
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Reading

LOSSES = ("minimized", "policy", "adversarial")
"""What a loop's loss may be. Only a loss that is minimized has a trend that can be judged."""

ROUNDING = 1e-4
"""Rounding error of the weights' length, as a share of it: far above that of fp32 sums."""

SAME_INTERVAL = 0.1
"""Two intervals that differ by at most this share are the same."""


class LoopSlowSpikes(SlowSpikes):
    """Looks for slow spikes in a user's own loop.

    Args:
        rate: see `SlowSpikes`.
    """

    min_stds = dict.fromkeys(("slow_gradient", "update_length"), 1.0)  # a factor of e is usual
    way_back = 'let Guard(rollback=True, slow="rollback") go back to before it'

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self._minimized = True

    def _make_tests(self, limit: float) -> dict[str, ChangePoint]:
        return {kind: SustainedRise(factor * limit) for kind, factor in THRESHOLDS.items() if kind != "weight_growth"}

    def _reset(self) -> None:
        super()._reset()
        self._rises: list[int] = []
        self._signed = False
        self._measured, self._changes_weights = 0, False

    def ignore_trends(self) -> None:
        """Judges no trend from now on: the loss is not one that falls, or other networks move it."""
        self._minimized = False
        self._forget_trends()

    def _forget_trends(self) -> None:
        for test in self._tests.values():
            test.reset()

    def add(self, reading: Reading) -> list[Alarm]:
        """Adds an applied step; returns an alarm if it reveals a change."""
        if reading.loss < 0 and not self._signed:
            self._signed = True
            self._forget_trends()
        changed = self._changed_outside(reading)
        found = super().add(reading) if self._minimized and not self._signed else []
        return changed or [alarm for alarm in found if not self._recurs(alarm.since or 0)]

    def _changed_outside(self, reading: Reading) -> list[Alarm]:
        """Returns an alarm if the weights' length has changed by more than the update's, for the first time."""
        before, self._weights = self._weights, reading.weights or None  # without a measurement nothing can be compared
        if not before or not reading.weights:
            return []
        self._measured += 1
        change = reading.weights - before
        if abs(change) <= reading.update + ROUNDING * max(before, reading.weights) or self._changes_weights:
            return []
        self._changes_weights = True
        if self._measured <= FIRST:
            return []
        were, are, update = (self.lengths.factor * length for length in (before, reading.weights, reading.update))
        text = (
            f"slow spike: the length of the weights went from {were:.4g} to {are:.4g} about step "
            f"{reading.step - 1}, and the optimizer's update was only {update:.2g} long: something else "
            "changed them. fix: if the loop does that itself, call guard.state_replaced() after it; else look for what "
            f"writes weights, or {self.way_back}"
        )
        return [Alarm("weight_growth", text, reading.step - 1)]

    def _recurs(self, since: int) -> bool:
        """Notes a rise; returns whether the last three began at a constant interval."""
        self._rises = [*self._rises[-2:], since]
        if len(self._rises) < 3:
            return False
        first, second, third = self._rises
        return abs((third - second) - (second - first)) <= SAME_INTERVAL * (second - first)

    def _values(self, reading: Reading) -> dict[str, float]:
        values = super()._values(reading)
        values.pop("weight_growth", None)
        return values

    def _cause(self, kind: str, since: int, reading: Reading) -> str:
        cause = super()._cause(kind, since, reading)
        return f'{cause}. A loss that is meant to rise needs Guard(loss="policy") or "adversarial"'

    def state_dict(self) -> dict[str, Any]:
        """All series and statistics, for the loop's checkpoint."""
        return super().state_dict() | {
            "signed": self._signed,
            "rises": list(self._rises),
            "measured": self._measured,
            "changes_weights": self._changes_weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them; what an older state lacks is as at the start."""
        super().load_state_dict(state)
        self._signed, self._rises = state.get("signed", False), list(state.get("rises", []))
        self._measured, self._changes_weights = state.get("measured", 0), state.get("changes_weights", False)


def loop_slow_spikes(mode: str | bool, rate: float, modes: tuple[str, ...], loss: str) -> NoSlowSpikes:
    """Returns what looks for slow spikes in a user's own loop.

    Args:
        mode, rate, modes: see `slow_spikes`.
        loss: one of `LOSSES`.

    Raises:
        ConfigError: an argument is out of bounds.
    """
    if loss not in LOSSES:
        raise ConfigError(f"Guard(loss={loss!r}) is not one of {', '.join(LOSSES)}")
    found = slow_spikes(mode, rate, modes)
    if not isinstance(found, SlowSpikes):
        return found
    made = LoopSlowSpikes(rate)
    if loss != "minimized":
        made.ignore_trends()
    return made
